"""Exactly one owner per pool: finds what else sets the replicas of a Deployment."""

from collections.abc import Collection

from cluster.errors import ConfigError
from deploy.operator.api_server import ApiError, ApiServer

_NO_SUCH_KIND = 404  # KEDA is not installed
# The path of each kind that scales Deployments. A ScaledObject without a kind in its reference means a Deployment.
_SCALERS = {
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers",
    "ScaledObject": "/apis/keda.sh/v1alpha1/namespaces/{namespace}/scaledobjects",
}


async def refuse_other_owners(api: ApiServer, namespace: str, deployments: Collection[str]) -> None:
    """Raise ConfigError if an autoscaler owns one of these Deployments. Raises ApiError and Unavailable."""
    for kind, path in _SCALERS.items():
        try:
            found = await api.get(path.format(namespace=namespace))
        except ApiError as error:
            if error.status != _NO_SUCH_KIND:
                raise
            continue
        for item in found["items"]:
            target = item["spec"]["scaleTargetRef"]
            if target.get("kind", "Deployment") == "Deployment" and target["name"] in deployments:
                name = item["metadata"]["name"]
                raise ConfigError(
                    f"{kind} {name} sets the replicas of {target['name']}, and a pool has one owner: delete it to scale"
                    " with `tandem scale`, or run this with --follow off"
                )
