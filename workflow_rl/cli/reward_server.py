"""``workflow-rl reward-server``."""

from pathlib import Path
from typing import Annotated

import typer

from workflow_rl.cli.arguments import OverridesArgument
from workflow_rl.config.loader import load_rewards
from workflow_rl.rewards.registry import spec_from_mapping


def reward_server(
    config_path: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="Configuration of a run, or a YAML file with `rewards` alone.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is all of them.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any.")] = 8400,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Samples of joined requests, at most.")
    ] = 8,
    wait_ms: Annotated[
        float, typer.Option("--wait-ms", min=0, help="Wait of a small request for others.")
    ] = 10.0,
    queue: Annotated[
        int, typer.Option("--queue", min=1, help="Samples that may wait, per reward.")
    ] = 512,
    max_body_mb: Annotated[
        int, typer.Option("--max-body-mb", min=1, help="Size of a request, at most.")
    ] = 1024,
) -> None:
    """Serve the rewards of a configuration to runs on other machines or in other environments.

    **Examples**

    ```
    workflow-rl reward-server configs/quickstart.yaml
    workflow-rl reward-server rewards.yaml --host 0.0.0.0 --port 8400 --batch-size 16
    ```

    It says that it is ready once every reward has loaded. A run uses it with
    `rewards.0.server.url=http://HOST:8400`. Whoever can reach the port can use it: listen on a
    private network. Ctrl-C answers what is in progress and ends. See docs/reward_serving.md.
    """
    entries = load_rewards(config_path, overrides or [])
    from workflow_rl.rewards.weights import import_extra

    for module in ("fastapi", "uvicorn", "prometheus_client"):
        import_extra(module, "server", "reward-server")
    from workflow_rl.rewards.remote.server import ServerSettings, build_service, listen, serve

    address = listen(host, port)
    specs = [spec_from_mapping(entry.model_dump()) for entry in entries]
    settings = ServerSettings(batch_size, wait_ms / 1000, queue, max_body_mb * 2**20)
    service = build_service(specs, settings)
    names = ", ".join(service.health()["rewards"])
    ready = f"ready: http://{host}:{address.getsockname()[1]} serves {names}"
    serve(service, address, on_ready=lambda: typer.echo(ready))
    typer.echo("stopped")
