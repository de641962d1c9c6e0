"""The command `inferlab`: calculators and tables beside the pipeline."""

import sys

import typer

from inferlab.economics.command import cost
from inferlab.errors import InferlabError
from inferlab.kvcache.command import kv
from inferlab.models.runtime.command import generate
from inferlab.monitoring.command import monitor
from inferlab.reporting.key_figures import studies
from inferlab.reporting.variants import variants

app = typer.Typer(add_completion=False)
app.command("cost")(cost)
app.command("generate")(generate)
app.command("kv")(kv)
app.command("monitor")(monitor)
app.command("studies")(studies)
app.command("variants")(variants)


@app.callback()
def inferlab() -> None:
    """Calculators and tables of inferlab; the pipeline itself runs by `dvc repro`."""


def main() -> None:
    """Run the command line; any fault of the user's is one line and exit status 1."""
    try:
        status = app(standalone_mode=False)
    except InferlabError as error:
        sys.exit(f"inferlab: {error}")
    except typer.TyperException as error:
        message = " ".join(error.format_message().split())
        sys.exit(f"inferlab: {message} (inferlab --help shows what there is)")
    except typer.Abort:
        sys.exit("inferlab: interrupted")
    sys.exit(status)


if __name__ == "__main__":
    main()
