{{/* The pod template of both workload kinds. */}}
{{- define "vtoken.podTemplate" -}}
metadata:
  labels:
    {{- include "vtoken.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    checksum/settings: {{ include "vtoken.environment" . | sha256sum }}
    checksum/keys: {{ toJson .Values.auth | sha256sum }}
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "vtoken.serviceAccountName" . }}
  automountServiceAccountToken: false
  # Otherwise a Service called vtoken or vllm would put VTOKEN_PORT or VLLM_PORT into the pod.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "vtoken.graceSeconds" . }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - {{ include "vtoken.container" . | nindent 6 | trim }}
    {{- with .Values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "vtoken.volumes" . | nindent 4 }}
{{- end -}}

{{- define "vtoken.container" -}}
name: vtoken-serve
image: {{ include "vtoken.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [vtoken-serve, serve]
args:
  {{- include "vtoken.args" . | trim | nindent 2 }}
envFrom:
  - configMapRef:
      name: {{ include "vtoken.fullname" . }}
  {{- with .Values.extraEnvFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $env := include "vtoken.secretEnv" . | trim }}
{{- if or $env .Values.extraEnv }}
env:
  {{- with $env }}{{ . | nindent 2 }}{{ end }}
  {{- with .Values.extraEnv }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
ports:
  - name: http
    containerPort: 8000
{{- with .Values.server.adminPort }}
  - name: admin
    containerPort: {{ int64 . }}
{{- end }}
{{- range $name, $probe := .Values.probes }}
{{ $name }}Probe:
  httpGet:
    path: {{ $probe.path }}
    port: http
  {{- omit $probe "path" | toYaml | nindent 2 }}
{{- end }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ int64 .Values.shutdown.preStopSeconds | quote }}]
{{- with .Values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "vtoken.resources" . }}
resources:
  {{- . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: cache, mountPath: {{ .Values.modelCache.mountPath }}}
  - {name: home, mountPath: /home/vtoken}
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- if include "vtoken.secretName" (list . "adminKeys") }}
  - {name: admin-keys, mountPath: /etc/vtoken/admin, readOnly: true}
  {{- end }}
  {{- range $key, $folder := include "vtoken.keyFolders" . | fromYaml }}
  {{- if include "vtoken.secretName" (list $ $key) }}
  - {name: {{ base $folder }}, mountPath: {{ $folder }}, readOnly: true}
  {{- end }}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* Where Secrets of named keys are mounted, by their place in `auth`. */}}
{{- define "vtoken.keyFolders" -}}
namedAdminKeys: /etc/vtoken/named-admin-keys
namedApiKeys: /etc/vtoken/named-api-keys
{{- end -}}

{{- define "vtoken.secretEnv" -}}
{{- $variables := dict "apiKey" "VLLM_API_KEY" "huggingFaceToken" "HF_TOKEN" -}}
{{- range $key, $variable := $variables }}
{{- with include "vtoken.secretName" (list $ $key) }}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ index $.Values.auth $key "existingSecretKey" }}
{{- end }}
{{- end }}
{{- if include "vtoken.secretName" (list . "adminKeys") }}
- name: VTOKEN_ADMIN_KEY_FILE
  value: /etc/vtoken/admin/keys
{{- end }}
{{- $folders := include "vtoken.keyFolders" . | fromYaml }}
{{- range $key, $variable := dict "namedAdminKeys" "VTOKEN_ADMIN_KEYS_DIR" "namedApiKeys" "VTOKEN_API_KEYS_DIR" }}
{{- if include "vtoken.secretName" (list $ $key) }}
- name: {{ $variable }}
  value: {{ index $folders $key }}
{{- end }}
{{- end }}
{{- end -}}

{{/* `resources` with the GPUs added to limits and requests. */}}
{{- define "vtoken.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if gt (int .Values.gpu.count) 0 -}}
{{- range $part := list "limits" "requests" -}}
{{- $gpu := dict $.Values.gpu.resourceName (int64 $.Values.gpu.count) -}}
{{- $_ := set $resources $part (merge $gpu (default dict (get $resources $part))) -}}
{{- end -}}
{{- end -}}
{{- with $resources }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- define "vtoken.volumes" -}}
{{- $cache := .Values.modelCache -}}
{{- if eq $cache.type "emptyDir" -}}
- name: cache
  emptyDir:
    sizeLimit: {{ $cache.size }}
{{ else if ne $cache.type "perReplica" -}}
- name: cache
  persistentVolumeClaim:
    claimName: {{ eq $cache.type "pvc" | ternary (printf "%s-cache" (include "vtoken.fullname" .)) $cache.existingClaim }}
{{ end -}}
- name: home
  emptyDir: {}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory.size }}
{{- with include "vtoken.secretName" (list . "adminKeys") }}
- name: admin-keys
  secret:
    secretName: {{ . }}
    items:
      - {key: {{ $.Values.auth.adminKeys.existingSecretKey }}, path: keys}
{{- end }}
{{- range $key, $folder := include "vtoken.keyFolders" . | fromYaml }}
{{- with include "vtoken.secretName" (list $ $key) }}
- name: {{ base $folder }}
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
