from . import api as api
from .app import create_app as create_app
from .service import Service as Service
from .settings import ServerSettings as ServerSettings
from .uvicorn_server import run as run
