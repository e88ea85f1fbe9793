{{/* Matchers of this release's series: the operator's monitors label them so. */}}
{{- define "vtoken.seriesSelector" -}}
{{- default (printf "namespace=\"%s\",pod=~\"%s-.+\"" .Release.Namespace (include "vtoken.fullname" .)) .Values.prometheusRule.selector -}}
{{- end -}}

{{/* An endpoint of a ServiceMonitor or PodMonitor. */}}
{{- define "vtoken.scrapeEndpoint" -}}
port: http
path: /metrics
interval: {{ .interval }}
scrapeTimeout: {{ .scrapeTimeout }}
{{- with .relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
