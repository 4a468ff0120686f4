"""The report over HTTP while a run goes on: the page at `/`, Prometheus text at `/metrics`."""

from __future__ import annotations

from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ssdtrain.report.page import page
from ssdtrain.report.prometheus import prometheus
from ssdtrain.report.run import NoJournals, Run

__all__ = ["Server"]

REFRESH_SECONDS = 10


class Server(ThreadingHTTPServer):
    """Reads the journals anew for every request, each on a thread of its own.

    Args:
        directory: of report.path.
        against: a second one, or None.
        host, port: to listen on; port 0: one that is free. Whoever reaches the address can read the report.

    Raises:
        OSError: the address is taken or not one of this machine's.
    """

    daemon_threads = True

    def __init__(self, directory: Path, against: Path | None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.directory, self.against = directory, against
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path not in ("/", "/metrics"):
            self._answer(404, "text/plain", "There is / and /metrics.\n")
            return
        try:
            run = Run.read(self.server.directory)
            if self.path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4", prometheus(run))
                return
            against = Run.read(self.server.against) if self.server.against else None
            self._answer(200, "text/html", page(run, against, refresh=REFRESH_SECONDS))
        except NoJournals as error:
            self._wait(str(error))
        except (OSError, ValueError) as error:
            self._answer(500, "text/plain", f"{error}\n")

    def _wait(self, why: str) -> None:
        if self.path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4", "")
            return
        refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
        self._answer(200, "text/html", f'<!doctype html><meta charset="utf-8">{refresh}<p>{escape(why)}')

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a terminal that shows training is no access log."""
