"""``python -m beamline`` is the command line: torchrun starts a module, and not a command that is on the path."""

from beamline.cli import main

if __name__ == "__main__":
    main()
