"""On PYTHONPATH, this keeps torch from import in a process and all that it starts: `make light` runs tests so."""

import sys


class NoTorch:
    """A finder that finds no torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is kept from import here", name="torch")


sys.meta_path.insert(0, NoTorch())
