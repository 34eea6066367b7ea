"""The Python end (grpcio) of a conversation with tonic-rdma: `peer.py call ADDR` or `peer.py serve`.

`run` puts the module that protoc makes of conformance.proto where this finds it.
"""

import sys
import threading

import conformance_pb2 as pb
import grpc
from common import endless, serve_methods

SERVICE = "tonic_rdma.conformance.v1.Conformance"
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
CODECS = {"request_serializer": pb.Message.SerializeToString, "response_deserializer": pb.Message.FromString}


class Client:
    def __init__(self, channel):
        def path(method):
            return f"/{SERVICE}/{method}"

        self.Unary = channel.unary_unary(path("Unary"), **CODECS)
        self.Upload = channel.stream_unary(path("Upload"), **CODECS)
        self.Download = channel.unary_stream(path("Download"), **CODECS)
        self.Chat = channel.stream_stream(path("Chat"), **CODECS)
        self.NoMethod = channel.unary_unary(path("NoMethod"), **CODECS)
        self.NoService = channel.unary_unary("/none.such.Service/Unary", **CODECS)


def script(*steps, before=(), **fields):
    return pb.Message(script=pb.Script(steps=steps, before=before, **fields))


def entries(*pairs):
    return [pb.Entry(key=k, value=v) for k, v in pairs]


def call(addr):
    client = Client(grpc.insecure_channel(addr, options=LIMITS))

    for size in (0, 1, 64, 70_000, 1 << 20, 5 << 20):
        # Seed and bytes come from the server, which checks what it gets back.
        made = client.Unary(script(pb.Step(send=pb.Send(size=size, seed=7, count=1))))
        assert len(made.payload) == size
        request = script(pb.Step(echo=1))
        request.payload, request.seed = made.payload, 7
        assert client.Unary(request).payload == made.payload

    messages = [script(pb.Step(receive=0), pb.Step(summary=True))] + [pb.Message()] * 20
    reply = client.Upload(iter(messages))
    assert (reply.count, reply.total) == (21, 0), reply

    replies = list(client.Download(script(pb.Step(send=pb.Send(size=3000, seed=1, count=20)))))
    assert [len(r.payload) for r in replies] == [3000] * 20

    replies = client.Chat(iter([script(pb.Step(echo=0)), *replies]))
    assert [len(r.payload) for r in replies] == [0] + [3000] * 20

    metadata = (("echo-a", "1"), ("echo-b-bin", b"\0\xff"), ("echo-a", "2"))
    _, done = client.Unary.with_call(script(echo_metadata=True), metadata=metadata, timeout=30)
    head = [(k, v) for k, v in done.initial_metadata() if k.startswith("echo-")]
    assert sorted(head) == sorted(metadata), head

    failure = pb.Failure(
        code=5, message="naïve 100%", details=b"d", metadata=entries(("t-one", b"1"), ("t-raw-bin", b"\0\xff"))
    )
    error = refused(lambda: client.Unary(script(before=[pb.Step(fail=failure)])))
    assert error.code() == grpc.StatusCode.NOT_FOUND, error
    assert error.details() == "naïve 100%", error
    trailers = dict(error.trailing_metadata())
    assert trailers["t-one"] == "1" and trailers["t-raw-bin"] == b"\0\xff", trailers

    for method in (client.NoMethod, client.NoService):
        error = refused(lambda: method(pb.Message()))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error

    # grpcio or the server may notice it first.
    error = refused(lambda: client.Unary(script(before=[pb.Step(hang=True)]), timeout=0.2))
    assert error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED), error

    # One message at a time, each answered before the next is sent, and then half-closed.
    turn, answered = threading.Semaphore(1), 0

    def one_by_one():
        yield script(pb.Step(echo=0))
        for n in range(1, 20):
            turn.acquire()
            yield pb.Message(count=n)

    for reply in client.Chat(one_by_one()):
        assert reply.payload == b"", reply
        answered += 1
        turn.release()
    assert answered == 20, answered

    # Cancelled before anything was sent, and after the first reply.
    begun = client.Upload.future(endless([]))
    begun.cancel()
    assert begun.code() == grpc.StatusCode.CANCELLED, begun.code()
    replies = client.Chat(endless([script(pb.Step(echo=0))]))
    next(replies)
    replies.cancel()
    assert refused(lambda: list(replies)).code() == grpc.StatusCode.CANCELLED
    # The connection and the server still work.
    assert client.Unary(script(pb.Step(echo=1))).payload == b""
    print("all kinds of call: ok")


def refused(call):
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call should have failed")


class Plain:
    """As much of the scripted service as `interop call` asks for."""

    def __init__(self):
        self.ended = threading.Semaphore(0)

    def Unary(self, request, context):
        if request.script.id == "wait for a cancelled call":
            assert self.ended.acquire(timeout=60)
            return pb.Message()
        for step in request.script.before:
            if step.hang:
                over = threading.Event()
                context.add_callback(over.set)
                over.wait(60)
                self.ended.release()
                return pb.Message()
            fail = step.fail
            context.set_trailing_metadata(
                [(e.key, e.value if e.key.endswith("-bin") else e.value.decode()) for e in fail.metadata]
            )
            code = next(c for c in grpc.StatusCode if c.value[0] == fail.code)
            context.abort(code, fail.message)
        return pb.Message(payload=request.payload, seed=request.seed)

    def Upload(self, requests, context):
        sizes = [len(request.payload) for request in requests]
        return pb.Message(count=len(sizes), total=sum(sizes))

    def Download(self, request, context):
        send = request.script.steps[0].send
        for _ in range(send.count):
            yield pb.Message(payload=bytes(send.size))

    def Chat(self, requests, context):
        for request in requests:
            yield pb.Message(payload=request.payload, seed=request.seed)


def serve():
    codecs = {"request_deserializer": pb.Message.FromString, "response_serializer": pb.Message.SerializeToString}
    plain = Plain()
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(plain.Unary, **codecs),
        "Upload": grpc.stream_unary_rpc_method_handler(plain.Upload, **codecs),
        "Download": grpc.unary_stream_rpc_method_handler(plain.Download, **codecs),
        "Chat": grpc.stream_stream_rpc_method_handler(plain.Chat, **codecs),
    }
    serve_methods(SERVICE, methods, LIMITS)


if __name__ == "__main__":
    call(sys.argv[2]) if sys.argv[1] == "call" else serve()
