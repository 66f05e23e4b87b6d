"""`accelerate launch -m draftsmith.train --config CONFIG [key=value ...]`: the trainer under accelerate's launcher."""

from __future__ import annotations

import argparse
import sys

from draftsmith.configs.console import report_error
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config


def main() -> None:
    """Parse the command line, train, and exit with status 2 on a fault of the inputs."""
    parser = argparse.ArgumentParser(prog="draftsmith.train", description=__doc__)
    parser.add_argument("--config", required=True, help="a YAML file or the name of a preset")
    parser.add_argument("--init-from", help="start from this drafter, in any form that can be converted")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    overrides = arguments.overrides + ([f"train.init_from={arguments.init_from}"] if arguments.init_from else [])
    try:
        config = load_config(arguments.config, overrides)
        from draftsmith.train import launch
        from draftsmith.train.trainer import train

        launch.explain_termination()
        try:
            train(config)
        except RuntimeError as error:
            if launch.is_peer_lost(error):
                launch.end(f"{error}\n{launch.PEER_LOST}", status=1)
            raise
    except DraftsmithError as error:
        report_error(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
