"""The server on Ray Serve: any number of engines behind one HTTP interface."""

try:
    from aquiline.serve.ray.application import Scale, app
except ModuleNotFoundError as error:
    message = f"{error.name} is not installed; pip install 'aquiline[ray]'"
    raise ModuleNotFoundError(message, name=error.name) from None

__all__ = ["Scale", "app"]
