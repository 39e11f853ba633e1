"""The server on Ray Serve: any number of engines behind one HTTP interface."""

from aquiline.serve.ray.application import Scale, app

__all__ = ["Scale", "app"]
