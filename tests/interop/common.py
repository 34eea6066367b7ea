"""What peer.py and cases.py have in common."""

import threading
from concurrent import futures

import grpc


def endless(first):
    """Requests of a call that its client does not end."""
    yield from first
    threading.Event().wait(60)


def serve_methods(service, methods, options=()):
    """Serves on a port of the system's choice, and prints the address."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=list(options))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()
