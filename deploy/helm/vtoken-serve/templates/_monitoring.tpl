{{/* Matchers of this release's series: the operator's monitors label them so. */}}
{{- define "vtoken.seriesSelector" -}}
{{- default (printf "namespace=\"%s\",pod=~\"%s-.+\"" .Release.Namespace (include "vtoken.fullname" .)) .Values.prometheusRule.selector -}}
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
