{{/*
A Deployment of the service; takes a dict of root, component (api or worker) and values (that component's).
*/}}
{{- define "halfnote.deployment" -}}
{{- $root := .root -}}{{- $own := .values -}}{{- $name := printf "%s-%s" (include "halfnote.fullname" $root) .component -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "halfnote.labels" (list $root .component) | nindent 4 }}
spec:
  {{- if not .scaled }}
  replicas: {{ $own.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  strategy:
    type: RollingUpdate
    rollingUpdate:
      # A pod stops only when its replacement serves.
      maxUnavailable: 0
      maxSurge: 1
  selector:
    matchLabels:
      {{- include "halfnote.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
  template:
    metadata:
      labels:
        {{- include "halfnote.labels" (list $root .component) | nindent 8 }}
        {{- with $own.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        # A changed Secret of this chart restarts pods; the chart cannot detect a change of another Secret.
        checksum/secrets: {{ include "halfnote.secretsChecksum" $root }}
        {{- with $own.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      {{- include "halfnote.placement" (list $root $own) | nindent 6 }}
      serviceAccountName: {{ include "halfnote.serviceAccountName" $root }}
      # The service never calls Kubernetes.
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ include "halfnote.grace" $root }}
      securityContext:
        {{- include "halfnote.securityContext" $root.Values.podSecurityContext | nindent 8 }}
      {{- with include "halfnote.spread" (list $root $own .component) | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- if $root.Values.postgresql.enabled }}
      initContainers:
        # The tryout's Postgres is made together with this pod, so no hook can migrate it before.
        - name: migrate
          image: {{ include "halfnote.image" (list $root $root.Values.image) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: [migrate]
          securityContext:
            {{- include "halfnote.securityContext" $root.Values.containerSecurityContext | nindent 12 }}
          env:
            {{- include "halfnote.migrationEnv" (list $root (include "halfnote.databaseSecret" $root)) | trim | nindent 12 }}
          resources:
            {{- toYaml $root.Values.migration.resources | nindent 12 }}
          volumeMounts:
            - name: tmp
              mountPath: /tmp
            - name: secrets
              mountPath: /etc/halfnote/secrets
              readOnly: true
      {{- end }}
      containers:
        - name: halfnote
          image: {{ include "halfnote.image" (list $root $root.Values.image) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: [serve, --role, {{ .component }}, --workers, {{ $own.processes | quote }}]
          securityContext:
            {{- include "halfnote.securityContext" $root.Values.containerSecurityContext | nindent 12 }}
          env:
            - name: POD_IP
              valueFrom:
                fieldRef:
                  fieldPath: status.podIP
            - name: HALFNOTE_HOST
              value: {{ $root.Values.host | quote }}
            - name: HALFNOTE_PORT
              value: "8080"
            {{- if $root.Values.keys.admin }}
            - name: HALFNOTE_ADMIN_KEY_FILE
              value: /etc/halfnote/secrets/admin-key
            {{- end }}
            - name: HALFNOTE_SECRETS_KEY_FILE
              value: /etc/halfnote/secrets/secrets.keys
            {{- if $root.Values.tls.enabled }}
            - name: HALFNOTE_TLS_CERT
              value: /etc/halfnote/tls/tls.crt
            - name: HALFNOTE_TLS_KEY
              value: /etc/halfnote/tls/tls.key
            {{- end }}
            {{- include "halfnote.databaseEnv" (list $root (include "halfnote.databaseSecret" $root)) | trim | nindent 12 }}
            {{- include "halfnote.settingsEnv" $root | trim | nindent 12 }}
            {{- with include "halfnote.allowedHostsEnv" $root }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with $root.Values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- with $root.Values.extraEnvFrom }}
          envFrom:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          ports:
            - name: http
              containerPort: 8080
          # A restart would not fix the database: /livez never queries it.
          startupProbe:
            {{- include "halfnote.probe" (list $root "/livez") | nindent 12 }}
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            {{- include "halfnote.probe" (list $root "/livez") | nindent 12 }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            {{- include "halfnote.probe" (list $root "/readyz") | nindent 12 }}
            periodSeconds: 5
            # It answers within 3 s, even if the database does not answer.
            timeoutSeconds: 5
            failureThreshold: 2
          lifecycle:
            preStop:
              # The pod keeps serving until proxies and Services know that it is terminating.
              sleep:
                seconds: {{ $root.Values.shutdown.preStopSeconds }}
          resources:
            {{- toYaml $own.resources | nindent 12 }}
          volumeMounts:
            - name: tmp
              mountPath: /tmp
            - name: secrets
              mountPath: /etc/halfnote/secrets
              readOnly: true
            {{- if $root.Values.tls.enabled }}
            # The whole directory: a kubelet does not update a file that is mounted by a subPath.
            - name: tls
              mountPath: /etc/halfnote/tls
              readOnly: true
            {{- end }}
            {{- with include "halfnote.databaseMount" $root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with $root.Values.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
        {{- with $root.Values.extraContainers }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumes:
        - name: tmp
          emptyDir:
            sizeLimit: 256Mi
        - name: secrets
          secret:
            secretName: {{ include "halfnote.keysSecret" $root }}
            defaultMode: 0440
            items:
              {{- if $root.Values.keys.admin }}
              - key: admin-key
                path: admin-key
              {{- end }}
              - key: secrets-keys
                path: secrets.keys
        {{- if $root.Values.tls.enabled }}
        - name: tls
          secret:
            secretName: {{ $root.Values.tls.secretName }}
            defaultMode: 0440
            items:
              - {key: tls.crt, path: tls.crt}
              - {key: tls.key, path: tls.key}
        {{- end }}
        {{- with include "halfnote.databaseVolume" (list $root (include "halfnote.databaseSecret" $root)) | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $root.Values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}

{{/* How pods are spread over nodes and zones; takes a list of the root, the component's values and its name. */}}
{{- define "halfnote.spread" -}}
{{- $root := index . 0 -}}{{- $own := index . 1 -}}{{- $component := index . 2 -}}
{{- if kindIs "slice" $own.topologySpreadConstraints }}
{{- with $own.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- else }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    # Old and new pods of a rollout are spread separately.
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels:
        {{- include "halfnote.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $component }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Takes a list of the root and the path. */}}
{{- define "halfnote.probe" -}}
httpGet:
  path: {{ index . 1 }}
  port: http
  {{- if (index . 0).Values.tls.enabled }}
  # A kubelet does not verify the certificate.
  scheme: HTTPS
  {{- end }}
  httpHeaders:
    - name: Host
      value: localhost
{{- end -}}
