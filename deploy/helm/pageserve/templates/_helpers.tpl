{{- define "pageserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pageserve.metadata" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "pageserve.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "pageserve.of-replicas" -}}
namespace="{{ .Release.Namespace }}",pod=~"{{ .Release.Name }}-[0-9a-z]+-[0-9a-z]{5}"
{{- end }}

{{- define "pageserve.grace-seconds" -}}
{{ add .Values.drain.preStopSeconds (ceil .Values.config.drain_timeout) .Values.drain.stopSeconds }}
{{- end }}

{{- define "pageserve.scaling-behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies: [{ type: Pods, value: 2, periodSeconds: 60 }]
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies: [{ type: Pods, value: 1, periodSeconds: {{ include "pageserve.grace-seconds" . }} }]
{{- end }}
