{{- define "halfnote.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters: a CronJob's name has 52, and components are appended. */}}
{{- define "halfnote.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "halfnote.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "halfnote.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "halfnote.selector" -}}
app.kubernetes.io/name: {{ include "halfnote.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of an object; takes a list of the root and the component. */}}
{{- define "halfnote.labels" -}}
{{- $root := index . 0 -}}
{{ include "halfnote.selector" $root }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: halfnote
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image's name; takes a list of the root and the image's values. */}}
{{- define "halfnote.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "halfnote.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "halfnote.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "halfnote.databaseSecret" -}}
{{- default (printf "%s-database" (include "halfnote.fullname" .)) .Values.database.existingSecret -}}
{{- end -}}

{{- define "halfnote.postgresqlSecret" -}}
{{- printf "%s-postgresql" (include "halfnote.fullname" .) -}}
{{- end -}}

{{- define "halfnote.keysSecret" -}}
{{- default (printf "%s-keys" (include "halfnote.fullname" .)) .Values.keys.existingSecret -}}
{{- end -}}

{{/* A checksum over the values that this chart writes into Secrets, so that a change restarts pods. */}}
{{- define "halfnote.secretsChecksum" -}}
{{- printf "%s\n%s\n%s" .Values.database.url .Values.database.existingSecret .Values.keys.existingSecret | sha256sum -}}
{{- end -}}

{{/* The database's URL, as environment; takes a list of the root and the Secret that has the URL. */}}
{{- define "halfnote.databaseEnv" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.postgresql.enabled }}
- name: POSTGRES_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "halfnote.postgresqlSecret" $root }}
      key: password
- name: HALFNOTE_DATABASE_URL
  value: postgresql://halfnote:$(POSTGRES_PASSWORD)@{{ include "halfnote.fullname" $root }}-postgresql:5432/halfnote
{{- else if $root.Values.database.mountAsFile }}
- name: HALFNOTE_DATABASE_URL_FILE
  value: /etc/halfnote/database/url
{{- else }}
- name: HALFNOTE_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ index . 1 }}
      key: {{ $root.Values.database.existingSecretKey }}
{{- end }}
{{- end -}}

{{/* Where the file with the database's URL is mounted. Without a subPath, so that a kubelet updates it. */}}
{{- define "halfnote.databaseMount" -}}
{{- if and .Values.database.mountAsFile (not .Values.postgresql.enabled) }}
- name: database
  mountPath: /etc/halfnote/database
  readOnly: true
{{- end }}
{{- end -}}

{{/* The volume of that file; takes a list of the root and the Secret that has the URL. */}}
{{- define "halfnote.databaseVolume" -}}
{{- $root := index . 0 -}}
{{- if and $root.Values.database.mountAsFile (not $root.Values.postgresql.enabled) }}
- name: database
  secret:
    secretName: {{ index . 1 }}
    defaultMode: 0440
    items:
      - {key: {{ $root.Values.database.existingSecretKey }}, path: url}
{{- end }}
{{- end -}}

{{/* Egress to DNS, in the form of a NetworkPolicy. */}}
{{- define "halfnote.dnsEgress" -}}
- ports:
    {{- range dig "dns" "ports" (list 53 5353) .Values.networkPolicy }}
    - {protocol: UDP, port: {{ . }}}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}

{{/* The ports of the database: those that are named, else those of the URL's hosts, as a list in YAML. */}}
{{- define "halfnote.databasePorts" -}}
{{- $ports := list 5432 -}}
{{- if .Values.postgresql.enabled -}}
{{- else if .Values.networkPolicy.database.port -}}
{{- $ports = list (int .Values.networkPolicy.database.port) -}}
{{- else if .Values.database.url -}}
{{- $rest := regexReplaceAll "^[a-z+]+://" .Values.database.url "" -}}
{{- $hosts := regexReplaceAll "^.*@" (regexFind "^[^/?#]*" $rest) "" -}}
{{- $ports = list -}}
{{- range splitList "," $hosts -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default "5432" | int) -}}
{{- end -}}
{{- $ports = uniq $ports -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end -}}

{{/* Egress to DNS and the database, in the form of a NetworkPolicy. */}}
{{- define "halfnote.databaseEgress" -}}
{{ include "halfnote.dnsEgress" . }}
- ports:
    {{- range include "halfnote.databasePorts" . | fromYamlArray }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- if .Values.postgresql.enabled }}
  to:
    - podSelector:
        matchLabels:
          {{- include "halfnote.selector" . | nindent 10 }}
          app.kubernetes.io/component: postgresql
  {{- else }}
  {{- with .Values.networkPolicy.database.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Annotations of what the migration's hook needs. Helm makes it before the hook, and the release after the hook. */}}
{{- define "halfnote.beforeMigration" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: "-5"
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* Environment of a migration; takes a list of the root and the Secret that has the URL. */}}
{{- define "halfnote.migrationEnv" -}}
{{- include "halfnote.databaseEnv" . }}
- name: HALFNOTE_AUTH
  value: keys
- name: HALFNOTE_SECRETS_KEY_FILE
  value: /etc/halfnote/secrets/secrets.keys
{{- with (index . 0).Values.settings.days_ahead }}
- name: HALFNOTE_DAYS_AHEAD
  value: {{ include "halfnote.scalar" . | quote }}
{{- end }}
{{- end -}}

{{/* The archive as a URL or a path; empty if there is none. */}}
{{- define "halfnote.archivePlace" -}}
{{- if .Values.archive.enabled -}}
{{- default "/archive" .Values.archive.url -}}
{{- end -}}
{{- end -}}

{{/* The values as HALFNOTE_… variables, without the database; the same for the service and the nightly programs. */}}
{{- define "halfnote.settingsEnv" -}}
{{- $settings := dict -}}
{{- range $name, $value := omit .Values.settings "allowed_hosts" -}}
{{- $_ := set $settings (printf "HALFNOTE_%s" (upper $name)) (include "halfnote.setting" $value) -}}
{{- end -}}
{{/* Without it some settings, such as those of OpenID Connect, are refused. */}}
{{- $_ := set $settings "HALFNOTE_AUTH" "keys" -}}
{{- $_ := set $settings "HALFNOTE_DRAIN_S" (include "halfnote.scalar" .Values.shutdown.drainSeconds) -}}
{{- with include "halfnote.archivePlace" . -}}
{{- $_ := set $settings "HALFNOTE_ARCHIVE" . -}}
{{- $_ := set $settings "HALFNOTE_ARCHIVE_BODIES" (toString $.Values.archive.bodies) -}}
{{- with $.Values.archive.keepSeconds -}}
{{- $_ := set $settings "HALFNOTE_ARCHIVE_KEEP_S" (include "halfnote.scalar" .) -}}
{{- end -}}
{{- end -}}
{{- range $name := keys $settings | sortAlpha }}
- name: {{ $name }}
  value: {{ get $settings $name | quote }}
{{- end }}
{{- end -}}

{{/* The names under which API and worker pods are called. */}}
{{- define "halfnote.allowedHostsEnv" -}}
{{- with .Values.settings.allowed_hosts -}}
{{/* Probes name localhost, commands in the pod and port-forward 127.0.0.1, and Prometheus the pod's address. The Job of
`apply` and the gateways name the host of their URL. */}}
{{- $own := list "localhost" "127.0.0.1" "$(POD_IP)" -}}
{{- range list $.Values.apply $.Values.rocketmq -}}
{{- if .enabled -}}
{{- $called := default (printf "http://%s" (include "halfnote.fullname" $)) .url | urlParse -}}
{{- $own = append $own $called.hostname -}}
{{- end -}}
{{- end -}}
- name: HALFNOTE_ALLOWED_HOSTS
  value: {{ concat $own . | uniq | join "," | quote }}
{{- end -}}
{{- end -}}

{{/* A list with commas, an object as JSON, everything else as it is. */}}
{{- define "halfnote.setting" -}}
{{- if kindIs "slice" . -}}{{ join "," . }}
{{- else if kindIs "map" . -}}{{ toJson . }}
{{- else -}}{{ include "halfnote.scalar" . }}{{- end -}}
{{- end -}}

{{/* A number without an exponent: Helm reads every number as a float. */}}
{{- define "halfnote.scalar" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* A security context of a pod or a container without the fields that are null; takes the values. */}}
{{- define "halfnote.securityContext" -}}
{{- $fields := dict -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $fields $name $value -}}{{- end -}}
{{- end -}}
{{- toYaml $fields -}}
{{- end -}}

{{/* The grace period covers the pause before SIGTERM, the drain and the exit. */}}
{{- define "halfnote.grace" -}}
{{- add .Values.shutdown.preStopSeconds (ceil .Values.shutdown.drainSeconds) 15 -}}
{{- end -}}

{{/* Scheduling and security context of pods; takes a list of the root and the component's values. */}}
{{- define "halfnote.placement" -}}
{{- $root := index . 0 -}}{{- $own := index . 1 -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}
