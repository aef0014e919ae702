{{/* The two nightly programs, in order: name, schedule, and whether each is enabled. */}}
{{- define "halfnote.nightly" -}}
reconcile:
  enabled: {{ ne .Values.reconciliation.engine "none" }}
  schedule: {{ .Values.reconciliation.schedule | quote }}
archive:
  enabled: {{ and .Values.archive.enabled (dig "scheduled" true .Values.archive) }}
  schedule: {{ .Values.archive.schedule | quote }}
{{- end -}}

{{/* What runs the programs. The archive of an installation that another one proves runs in one pod. */}}
{{- define "halfnote.sparkEngine" -}}
{{- eq .Values.reconciliation.engine "none" | ternary "local" .Values.reconciliation.engine -}}
{{- end -}}

{{/* A program's options; takes a list of the root and the program. */}}
{{- define "halfnote.sparkOptions" -}}
{{- $root := index . 0 -}}
{{- if eq (index . 1) "reconcile" -}}
- --staging
- /staging
{{- with $root.Values.reconciliation.out }}
- --out
- {{ . }}
{{- end }}
{{- $installations := $root.Values.reconciliation.installations }}
{{- with $root.Values.reconciliation.baseUrl }}
- --base-url
- {{ $installations.others | empty | ternary "" (printf "%s=" $installations.name) }}{{ . }}
{{- end }}
{{- range $installations.others }}
{{- if .baseUrl }}
- --base-url
- {{ .name }}={{ .baseUrl }}
{{- end }}
{{- end }}
{{- with $root.Values.reconciliation.args }}
{{ toYaml . }}
{{- end }}
{{- else }}
{{- with $root.Values.archive.args }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Environment of every pod, as Spark settings. */}}
{{- define "halfnote.extraSparkEnv" -}}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- with .Values.reconciliation.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes a list of the root and the program. */}}
{{- define "halfnote.sparkEnv" -}}
{{- $root := index . 0 -}}
{{- $engine := include "halfnote.sparkEngine" $root -}}
{{- include "halfnote.databaseEnv" (list $root (include "halfnote.databaseSecret" $root)) }}
{{- include "halfnote.settingsEnv" $root }}
{{- if eq (index . 1) "reconcile" }}
{{- include "halfnote.installationsEnv" $root }}
{{- end }}
{{- if and (eq (index . 1) "archive") (eq $engine "local") }}
# The program has no option for the scratch directory. Spark would mount a separate volume there for its executors.
- name: SPARK_LOCAL_DIRS
  value: /staging
{{- end }}
{{- if eq $engine "local" }}
{{- $master := dict "spark.master" (printf "local[%d]" (int (default 2 $root.Values.reconciliation.cores))) }}
{{- $conf := merge (dict) $root.Values.reconciliation.sparkConf $master }}
- name: HALFNOTE_SPARK_CONF
  value: |-
    {{- range $name := keys $conf | sortAlpha }}
    {{ $name }}={{ index $conf $name }}
    {{- end }}
{{- end }}
{{- if include "halfnote.certificateSecret" . }}
{{- with $root.Values.reconciliation.certificate.command }}
- name: HALFNOTE_CERTIFICATE_COMMAND
  value: {{ . | quote }}
{{- end }}
- name: HALFNOTE_CERTIFICATE_{{ empty $root.Values.reconciliation.certificate.command | ternary "KEY" "PUBLIC_KEY" }}
  value: /etc/halfnote/certificate/key.pem
{{- end }}
{{- include "halfnote.extraSparkEnv" $root }}
{{- end -}}

{{/* The URLs of several installations, each from its Secret; Kubernetes puts them into one variable. */}}
{{- define "halfnote.installationsEnv" -}}
{{- $file := and .Values.database.mountAsFile (not .Values.postgresql.enabled) }}
{{- with .Values.reconciliation.installations }}
{{- if .others }}
{{- $urls := list (printf "%s=%s" .name ($file | ternary "file:/etc/halfnote/database/url" "$(HALFNOTE_DATABASE_URL)")) }}
{{- range $number, $other := .others }}
{{- $variable := printf "HALFNOTE_DATABASE_URL_OF_%d" (add1 $number) }}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef:
      name: {{ $other.existingSecret }}
      key: {{ default "database-url" $other.existingSecretKey }}
{{- $urls = append $urls (printf "%s=$(%s)" $other.name $variable) }}
{{- end }}
- name: HALFNOTE_DATABASE_URLS
  value: {{ join " " $urls | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The Secret of the key of certificates, which only the proof gets: no archive and no executor. Takes a list of the
root and the program. */}}
{{- define "halfnote.certificateSecret" -}}
{{- $root := index . 0 -}}
{{- if eq (index . 1) "reconcile" }}{{ $root.Values.reconciliation.certificate.existingSecret }}{{ end -}}
{{- end -}}

{{/* Takes a list of the root and the program. */}}
{{- define "halfnote.certificateMount" -}}
{{- if include "halfnote.certificateSecret" . }}
- name: certificate
  mountPath: /etc/halfnote/certificate
  readOnly: true
{{- end }}
{{- end -}}

{{/* Takes a list of the root and the program. */}}
{{- define "halfnote.certificateVolume" -}}
{{- $root := index . 0 -}}
{{- with include "halfnote.certificateSecret" . }}
- name: certificate
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - {key: {{ $root.Values.reconciliation.certificate.existingSecretKey }}, path: key.pem}
{{- end }}
{{- end -}}

{{/* Volumes that the programs write: the rows of a run, and the archive if it is a volume. */}}
{{- define "halfnote.sparkMounts" -}}
- name: tmp
  mountPath: /tmp
- name: staging
  mountPath: /staging
{{- if and .Values.archive.enabled (not .Values.archive.url) }}
- name: archive
  mountPath: /archive
{{- end }}
{{- include "halfnote.databaseMount" . }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "halfnote.sparkVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
- name: staging
  {{- if eq (include "halfnote.sparkEngine" .) "local" }}
  emptyDir:
    sizeLimit: {{ .Values.reconciliation.staging.size }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "halfnote.stagingClaim" . }}
  {{- end }}
{{- if and .Values.archive.enabled (not .Values.archive.url) }}
- name: archive
  persistentVolumeClaim:
    claimName: {{ include "halfnote.archiveClaim" . }}
{{- end }}
{{- include "halfnote.databaseVolume" (list . (include "halfnote.databaseSecret" .)) }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A quantity of memory in MiB. Java's units are lower case, so `g` is Gi; `m` of Kubernetes is no amount of memory. */}}
{{- define "halfnote.mebibytes" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $units := dict "" 1 "k" 1024 "m" 1048576 "g" 1073741824 "t" 1099511627776 -}}
{{- $units = merge $units (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624) -}}
{{- $units = merge $units (dict "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000) -}}
{{- divf (mulf (trimSuffix $unit $text | float64) (get $units $unit)) 1048576 -}}
{{- end -}}

{{/* What the operator's driver requests, in MiB: Spark adds 40 % for Python, at least 384 MiB. Empty: its settings say. */}}
{{- define "halfnote.driverRequest" -}}
{{- $conf := .Values.reconciliation.sparkConf -}}
{{- if not (or (hasKey $conf "spark.driver.memoryOverhead") (hasKey $conf "spark.driver.minMemoryOverhead") (hasKey $conf "spark.driver.memoryOverheadFactor") (hasKey $conf "spark.kubernetes.memoryOverheadFactor")) -}}
{{- $memory := include "halfnote.mebibytes" .Values.reconciliation.driverMemory | float64 -}}
{{- addf $memory (maxf (mulf $memory 0.4) 384) | ceil -}}
{{- end -}}
{{- end -}}

{{/* The limit of that driver's memory; empty: Spark's own, which is its request. The value's default is of other engines,
and a limit below the request would make a pod that Kubernetes refuses. */}}
{{- define "halfnote.driverLimit" -}}
{{- $limit := include "halfnote.scalar" (dig "limits" "memory" "" .Values.reconciliation.resources) -}}
{{- $request := include "halfnote.driverRequest" . -}}
{{- if and $limit $request (lt (include "halfnote.mebibytes" $limit | float64) (float64 $request)) -}}
{{- if ne $limit "4Gi" -}}
{{- fail (printf "reconciliation.resources.limits.memory is %s, but Spark's driver requests %sMi: driverMemory (%s), and 40 %% of it for Python, at least 384Mi. Raise the limit, or lower driverMemory." $limit $request .Values.reconciliation.driverMemory) -}}
{{- end -}}
{{- else -}}
{{- $limit -}}
{{- end -}}
{{- end -}}

{{- define "halfnote.stagingClaim" -}}
{{- default (printf "%s-staging" (include "halfnote.fullname" .)) .Values.reconciliation.staging.existingClaim -}}
{{- end -}}

{{- define "halfnote.archiveClaim" -}}
{{- default (printf "%s-archive" (include "halfnote.fullname" .)) .Values.archive.volume.existingClaim -}}
{{- end -}}

{{- define "halfnote.sparkServiceAccount" -}}
{{- printf "%s-spark" (include "halfnote.fullname" .) -}}
{{- end -}}

{{/* Spark's settings for executors of `kubernetes`; the operator describes its executors by halfnote.operatorPod. */}}
{{- define "halfnote.executorConf" -}}
spark.kubernetes.executor.volumes.persistentVolumeClaim.staging.mount.path: /staging
spark.kubernetes.executor.volumes.persistentVolumeClaim.staging.options.claimName: {{ include "halfnote.stagingClaim" . }}
{{- if and .Values.archive.enabled (not .Values.archive.url) }}
spark.kubernetes.executor.volumes.persistentVolumeClaim.archive.mount.path: /archive
spark.kubernetes.executor.volumes.persistentVolumeClaim.archive.options.claimName: {{ include "halfnote.archiveClaim" . }}
{{- end }}
spark.kubernetes.executor.podTemplateFile: /etc/halfnote/spark/executor.yaml
{{- end -}}

{{/* A pod in the Spark operator's format; takes a list of the root and the component. */}}
{{- define "halfnote.operatorPod" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "halfnote.labels" . | nindent 2 }}
  halfnote/spark: "true"
podSecurityContext:
  {{- include "halfnote.securityContext" $root.Values.podSecurityContext | nindent 2 }}
securityContext:
  {{- include "halfnote.securityContext" $root.Values.containerSecurityContext | nindent 2 }}
{{- with $root.Values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.reconciliation.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.reconciliation.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.reconciliation.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.reconciliation.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- $env := include "halfnote.extraSparkEnv" $root | trim }}
{{- if ne (index . 1) "executor" }}
{{- $env = include "halfnote.sparkEnv" . | trim }}
{{- end }}
{{- with $env }}
env:
  {{- . | nindent 2 }}
{{- end }}
{{- with $root.Values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "halfnote.sparkMounts" $root | nindent 2 }}
  {{- with include "halfnote.certificateMount" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}
