{{/* Matchers of this release's series: the operator's monitors label them so. */}}
{{- define "vtoken.seriesSelector" -}}
{{- default (printf "namespace=\"%s\",pod=~\"%s\"" .Release.Namespace (include "vtoken.podPattern" .)) .Values.prometheusRule.selector -}}
{{- end -}}

{{/* Names of this release's pods and of no other's: a release called like this one and "-l4" has pods
that begin alike. Kubernetes writes a Deployment's hash, a number of 32 bits, in ten letters, and five
random letters behind it; what is longer than 58 before these is cut, at most the dash and a letter. */}}
{{- define "vtoken.podPattern" -}}
{{- $name := include "vtoken.fullname" . -}}
{{- if eq (include "vtoken.workloadKind" .) "StatefulSet" -}}
{{ $name }}-[0-9]+
{{- else -}}
{{ $name }}-[4-9bcdf]{1,10}{{ gt (len $name) 46 | ternary "-?" "-" }}[bcdfghjklmnpqrstvwxz2456789]{5}
{{- end -}}
{{- end -}}

{{/* An endpoint of a ServiceMonitor or PodMonitor: (list . .Values.serviceMonitor). */}}
{{- define "vtoken.scrapeEndpoint" -}}
{{- $root := index . 0 -}}
{{- with index . 1 -}}
port: http
path: /metrics
interval: {{ .interval }}
scrapeTimeout: {{ .scrapeTimeout }}
{{- if $root.Values.server.metricsKeyRequired }}
authorization:
  type: Bearer
  credentials:
    name: {{ include "vtoken.secretName" (list $root "apiKey") }}
    key: {{ $root.Values.auth.apiKey.existingSecretKey }}
{{- end }}
{{- with .relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
{{- end -}}
