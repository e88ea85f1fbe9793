{{/* A value as text: whole numbers without exponent, mappings and lists as JSON. */}}
{{- define "vtoken.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else if or (kindIs "map" .) (kindIs "slice" .) -}}
{{ toJson . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* VTOKEN_<FIELD>: value, for every setting that is not null. */}}
{{- define "vtoken.environment" -}}
{{- range $settings := list .Values.vtoken .Values.server }}
{{- range $key, $value := $settings }}
{{- if not (kindIs "invalid" $value) }}
VTOKEN_{{ $key | snakecase | upper }}: {{ include "vtoken.text" $value | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.server.adminPort }}
VTOKEN_ADMIN_HOST: "0.0.0.0"
{{- end }}
HF_HUB_OFFLINE: {{ .Values.vllm.model | empty | ternary "1" "0" | quote }}
HF_HOME: {{ .Values.modelCache.mountPath }}/huggingface
XDG_CACHE_HOME: {{ .Values.modelCache.mountPath }}
{{- end -}}

{{- define "vtoken.args" -}}
{{- $vllm := .Values.vllm -}}
{{- with $vllm.model }}
- {{ . | quote }}
{{- end }}
- --host=0.0.0.0
- --port=8000
{{- range $key := list "maxModelLen" "dtype" "kvCacheMemoryBytes" "gpuMemoryUtilization" "maxNumSeqs" "blockSize" }}
{{- $value := index $vllm $key }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- --{{ $key | kebabcase }}={{ include "vtoken.text" $value }}
{{- end }}
{{- end }}
{{- $parallel := int (default .Values.gpu.count $vllm.tensorParallelSize) }}
{{- if gt $parallel 1 }}
- --tensor-parallel-size={{ $parallel }}
{{- end }}
{{- if $vllm.enforceEager }}
- --enforce-eager
{{- end }}
{{- with $vllm.servedModelName }}
- --served-model-name
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- range $vllm.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* preStop + drain + margin: the least that loses no stream. */}}
{{- define "vtoken.neededGraceSeconds" -}}
{{- with .Values.shutdown -}}
{{ add (int64 .preStopSeconds) (int64 $.Values.server.drainSeconds) (int64 .marginSeconds) }}
{{- end -}}
{{- end -}}

{{- define "vtoken.graceSeconds" -}}
{{- default (include "vtoken.neededGraceSeconds" .) .Values.terminationGracePeriodSeconds | int64 -}}
{{- end -}}
