"""Named sets of values that together make every template render, and most branches of each."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

GPU: Values = {
    "gpu": {"count": 2},
    "vtoken": {"mode": "off"},
    "vllm": {"model": "org/model", "enforceEager": False, "extraArgs": ["--enable-lora"]},
}
NETWORK: Values = {
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "600"},
        "hosts": [{"host": "llm.example.com", "paths": [{"path": "/v1", "pathType": "Prefix"}]}],
        "tls": [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}],
    },
    "httpRoute": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways"}],
        "hostnames": ["llm.example.com"],
        "requestTimeout": "600s",
    },
    "networkPolicy": {
        "enabled": True,
        "scrapeFrom": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}],
    },
    "vllm": {"model": "org/model"},
    "service": {"type": "NodePort", "sessionAffinity": "ClientIP"},
}
MONITORING: Values = {
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "relabelings": [{"action": "labeldrop", "regex": "endpoint"}],
        "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "go_.*"}],
    },
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "alertLabels": {"team": "inference"}},
    "dashboards": {"enabled": True},
}
EXTRAS: Values = {
    "commonLabels": {"team": "inference"},
    "image": {"digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "pull"}],
    "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "4Gi"}},
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]},
                ]
            }
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "extraEnv": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
    "extraEnvFrom": [{"secretRef": {"name": "more"}}],
    "extraVolumes": [{"name": "data", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "data", "mountPath": "/data"}],
    "initContainers": [{"name": "wait", "image": "busybox", "command": ["true"]}],
    "extraContainers": [{"name": "side", "image": "busybox", "command": ["sleep", "1d"]}],
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "{{ .Release.Name }}-extra"},
            "data": {"k": "v"},
        }
    ],
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn"}},
    "tests": {"enabled": False},
}
KEYS: Values = {
    "auth": {
        "apiKey": {"value": "api-secret"},
        "adminKeys": {"value": "first-admin\nsecond-admin\n"},
        "huggingFaceToken": {"existingSecret": "hf", "existingSecretKey": "token"},
    }
}
NAMED_KEYS: Values = {
    "auth": {
        "apiKey": {"existingSecret": "vtoken-keys"},
        "namedApiKeys": {"existingSecret": "vtoken-api-keys"},
        "namedAdminKeys": {"existingSecret": "vtoken-admin-keys"},
    },
    "server": {"adminPort": 8001, "metricsKeyRequired": True},
    "service": {"type": "LoadBalancer"},
    "networkPolicy": {
        "enabled": True,
        "adminFrom": [{"podSelector": {"matchLabels": {"role": "operator"}}}],
    },
    "serviceMonitor": {"enabled": True},
    "podMonitor": {"enabled": True},
}

MATRIX: dict[str, Values] = {
    "defaults": {},
    "gpu": GPU,
    "network": NETWORK,
    "monitoring": MONITORING,
    "extras": EXTRAS,
    "keys": KEYS,
    "named-keys": NAMED_KEYS,
    "pvc-kept": {"modelCache": {"type": "pvc", "storageClassName": "fast"}},
    "pvc-shared": {
        "modelCache": {"type": "pvc", "accessModes": ["ReadWriteMany"], "keep": False},
        "replicas": 3,
    },
    "existing-claim": {"modelCache": {"type": "existingClaim", "existingClaim": "models"}},
    "per-replica": {"modelCache": {"type": "perReplica", "annotations": {"a": "b"}}, "replicas": 2},
    "rolling": {
        "strategy": {"type": "RollingUpdate", "maxSurge": "25%", "maxUnavailable": 1},
        "podDisruptionBudget": {"enabled": True, "minAvailable": "50%", "maxUnavailable": None},
        "replicas": 2,
    },
    "hpa": {"autoscaling": {"kind": "hpa"}, "podDisruptionBudget": {"enabled": True}},
    "keda": {"autoscaling": {"kind": "keda", "keda": {"serverAddress": "http://prometheus:9090"}}},
    "keep-ratio": {"vtoken": {"keepRatio": 0.5, "policyArgs": {"a": [1, 0.5]}}},
    "openshift": {"podSecurityContext": {"runAsUser": None, "fsGroup": None}},
}
