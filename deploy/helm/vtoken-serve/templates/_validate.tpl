{{/* What a schema cannot say. Every sentence names the value to change. */}}
{{- define "vtoken.validate" -}}
{{- include "vtoken.validateToken" . -}}
{{- include "vtoken.validateWorkload" . -}}
{{- include "vtoken.validateNetwork" . -}}
{{- end -}}

{{- define "vtoken.validateToken" -}}
{{- $v := .Values.vtoken -}}
{{- if and (not (kindIs "invalid" $v.keepRatio)) (not (kindIs "invalid" $v.budgetTokens)) -}}
{{- fail "vtoken.keepRatio and vtoken.budgetTokens exclude each other: set one to null" -}}
{{- end -}}
{{- $protected := add (int64 $v.sinkTokens) (int64 $v.recentTokens) -}}
{{- if and (not (kindIs "invalid" $v.budgetTokens)) (le (int64 $v.budgetTokens) $protected) -}}
{{- fail (printf "vtoken.budgetTokens=%d must be above sinkTokens + recentTokens = %d" (int64 $v.budgetTokens) $protected) -}}
{{- end -}}
{{- range $flag := list "--host" "--port" "--shutdown-timeout" "--uds" -}}
{{- range $.Values.vllm.extraArgs -}}
{{- if eq $flag (first (splitList "=" .)) -}}
{{- fail (printf "vllm.extraArgs has %s, which the chart sets itself" $flag) -}}
{{- end -}}
{{- if eq "--api-key" (first (splitList "=" .)) -}}
{{- fail "vllm.extraArgs has --api-key, which everybody could read: use auth.apiKey" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "vtoken.validateWorkload" -}}
{{- $needed := int64 (include "vtoken.neededGraceSeconds" .) -}}
{{- $grace := int64 (include "vtoken.graceSeconds" .) -}}
{{- if lt $grace $needed -}}
{{- fail (printf "terminationGracePeriodSeconds=%d is less than shutdown.preStopSeconds + server.drainSeconds + shutdown.marginSeconds = %d: streams would be cut; raise it or leave it null" $grace $needed) -}}
{{- end -}}
{{- $parallel := int (default 0 .Values.vllm.tensorParallelSize) -}}
{{- if and (gt (int .Values.gpu.count) 0) (gt $parallel (int .Values.gpu.count)) -}}
{{- fail (printf "vllm.tensorParallelSize=%d needs as many GPUs, gpu.count is %d" $parallel (int .Values.gpu.count)) -}}
{{- end -}}
{{- $cache := .Values.modelCache -}}
{{- if and (eq $cache.type "existingClaim") (not $cache.existingClaim) -}}
{{- fail "modelCache.type=existingClaim needs the claim's name in modelCache.existingClaim" -}}
{{- end -}}
{{- $scales := ne .Values.autoscaling.kind "none" -}}
{{- $pods := $scales | ternary (int .Values.autoscaling.maxReplicas) (int .Values.replicas) -}}
{{- $surges := and (eq .Values.strategy.type "RollingUpdate") (not (include "vtoken.isZero" .Values.strategy.maxSurge)) -}}
{{- $atOnce := $surges | ternary (add1 $pods) $pods -}}
{{- $shared := or (has "ReadWriteMany" $cache.accessModes) (has "ReadOnlyMany" $cache.accessModes) -}}
{{- if and (eq $cache.type "pvc") (gt (int $atOnce) 1) (not $shared) -}}
{{- $whence := $surges | ternary " (one of them of strategy.maxSurge)" "" -}}
{{- $remedy := and $surges (eq $pods 1) | ternary "strategy.type=Recreate, " "" -}}
{{- fail (printf "%d pods%s cannot share one claim with accessModes %s: use %sReadWriteMany, or modelCache.type=perReplica" (int $atOnce) $whence (join "," $cache.accessModes) $remedy) -}}
{{- end -}}
{{- if and $scales (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas=%d is above maxReplicas=%d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and (eq .Values.autoscaling.kind "keda") (not .Values.autoscaling.keda.serverAddress) -}}
{{- fail "autoscaling.kind=keda needs autoscaling.keda.serverAddress, the address of Prometheus" -}}
{{- end -}}
{{- with .Values.podDisruptionBudget -}}
{{- if and .enabled (not (kindIs "invalid" .minAvailable)) (not (kindIs "invalid" .maxUnavailable)) -}}
{{- fail "podDisruptionBudget.minAvailable and maxUnavailable exclude each other: set one to null" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.strategy.type "RollingUpdate") (include "vtoken.isZero" .Values.strategy.maxSurge) (include "vtoken.isZero" .Values.strategy.maxUnavailable) -}}
{{- fail "strategy.maxSurge and maxUnavailable are both 0: a rolling update could never begin" -}}
{{- end -}}
{{- end -}}

{{/* Of a number or share of pods: "true" for 0 and 0%. */}}
{{- define "vtoken.isZero" -}}
{{- if regexMatch "^0+%?$" (toString .) }}true{{ end -}}
{{- end -}}

{{- define "vtoken.validateNetwork" -}}
{{- $scraped := or .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- if and .Values.server.metricsKeyRequired $scraped (not (include "vtoken.secretName" (list . "apiKey"))) -}}
{{- fail "server.metricsKeyRequired with a monitor needs auth.apiKey, the key that Prometheus sends" -}}
{{- end -}}
{{- if eq (int64 (default 0 .Values.server.adminPort)) 8000 -}}
{{- fail "server.adminPort=8000 is the port of the API" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled needs at least one entry in ingress.hosts" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs a gateway in httpRoute.parentRefs" -}}
{{- end -}}
{{- end -}}
