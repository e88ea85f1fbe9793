{{- define "vtoken.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Room is left for suffixes of 11 characters and a StatefulSet's pod names. */}}
{{- define "vtoken.fullname" -}}
{{- $name := include "vtoken.name" . -}}
{{- $joined := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $joined .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{- define "vtoken.selectorLabels" -}}
app.kubernetes.io/name: {{ include "vtoken.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Of the pod of `helm test`; NetworkPolicy lets it in by them. */}}
{{- define "vtoken.testLabels" -}}
app.kubernetes.io/component: test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "vtoken.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "vtoken.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of an object: (list . suffix [labels] [annotations]) */}}
{{- define "vtoken.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "vtoken.fullname" $root }}{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "vtoken.labels" $root | nindent 2 }}
  {{- if gt (len .) 2 }}{{ with index . 2 }}{{ toYaml . | nindent 2 }}{{ end }}{{ end }}
{{- if gt (len .) 3 }}
{{- with index . 3 }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "vtoken.serviceAccountName" -}}
{{- $default := .Values.serviceAccount.create | ternary (include "vtoken.fullname" .) "default" -}}
{{- default $default .Values.serviceAccount.name -}}
{{- end -}}

{{- define "vtoken.image" -}}
{{- $image := .Values.image -}}
{{- $kind := gt (int .Values.gpu.count) 0 | ternary "gpu" "cpu" -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (printf "%s-%s" .Chart.AppVersion $kind) }}
{{- end -}}
{{- end -}}

{{- define "vtoken.workloadKind" -}}
{{- eq .Values.modelCache.type "perReplica" | ternary "StatefulSet" "Deployment" -}}
{{- end -}}

{{/* Secret that holds a key: (list . "apiKey"); empty without one. */}}
{{- define "vtoken.secretName" -}}
{{- $root := index . 0 -}}
{{- $key := index $root.Values.auth (index . 1) -}}
{{- if $key.existingSecret -}}
{{ $key.existingSecret }}
{{- else if $key.value -}}
{{ include "vtoken.fullname" $root }}-auth
{{- end -}}
{{- end -}}
