{{/* Shell command that prints a key: (list . "adminKeys" "namedAdminKeys"); empty without one. */}}
{{- define "vtoken.keyCommand" -}}
{{- $root := index . 0 -}}
{{- $line := index . 1 -}}
{{- $kubectl := printf "kubectl -n %s get secret" $root.Release.Namespace -}}
{{- $single := include "vtoken.secretName" (list $root $line) -}}
{{- $named := include "vtoken.secretName" (list $root (index . 2)) -}}
{{- if $single -}}
{{ $kubectl }} {{ $single }} -o jsonpath='{.data.{{ index $root.Values.auth $line "existingSecretKey" | replace "." "\\." }}}' | base64 -d
{{- if eq $line "adminKeys" }} | {{ include "vtoken.firstKey" $root }}{{ end -}}
{{- else if $named -}}
{{ $kubectl }} {{ $named }} -o jsonpath='{.data.*}' | cut -d ' ' -f 1 | base64 -d | {{ include "vtoken.firstKey" $root }}
{{- end -}}
{{- end -}}

{{/* The first line that is no comment, without the name before the key, as the server reads it. */}}
{{- define "vtoken.firstKey" -}}
sed -nE 's/^[[:space:]]+//; s/[[:space:]]+$//; /^(#|$)/d; s/^[A-Za-z0-9][A-Za-z0-9._-]{0,63}:[[:space:]]+//; p; q'
{{- end -}}

{{/* Who may call the API under the NetworkPolicy, in words, where nobody thought of outside; else empty. */}}
{{- define "vtoken.closedTo" -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled (not .ingressFrom) -}}
nobody
{{- else if and .enabled (eq (toJson .ingressFrom) `[{"podSelector":{}}]`) -}}
only pods of namespace {{ $.Release.Namespace }}
{{- end -}}
{{- end -}}
{{- end -}}
