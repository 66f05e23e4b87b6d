"""`accelerate launch -m draftsmith.train --config CONFIG [key=value ...]`: the trainer under accelerate's launcher."""

from __future__ import annotations

import argparse
import sys

from draftsmith.configs.console import report_error
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.train.command import run


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
        run(config, launched=True)
    except DraftsmithError as error:
        report_error(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
