"""The Python end (grpcio) of a conversation with tonic-rdma: `peer.py call ADDR` or `peer.py serve`."""

import sys
from concurrent import futures
from pathlib import Path

import grpc

sys.path.append(str(Path(__file__).resolve().parent.parent / "proto"))
pb, stubs = grpc.protos_and_services("conformance.proto")
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def script(*steps, before=(), **fields):
    return pb.Message(script=pb.Script(steps=steps, before=before, **fields))


def entries(*pairs):
    return [pb.Entry(key=k, value=v) for k, v in pairs]


def call(addr):
    client = stubs.ConformanceStub(grpc.insecure_channel(addr, options=LIMITS))

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
    try:
        client.Unary(script(before=[pb.Step(fail=failure)]))
        raise AssertionError("the server should have refused")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.NOT_FOUND, error
        assert error.details() == "naïve 100%", error
        trailers = dict(error.trailing_metadata())
        assert trailers["t-one"] == "1" and trailers["t-raw-bin"] == b"\0\xff", trailers

    try:
        client.Unary(script(before=[pb.Step(hang=True)]), timeout=0.2)
        raise AssertionError("the deadline should have passed")
    except grpc.RpcError as error:
        assert error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED), error
    print("all kinds of call: ok")


class Plain(stubs.ConformanceServicer):
    """As much of the scripted service as `interop call` asks for."""

    def Unary(self, request, context):
        for step in request.script.before:
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
    server = grpc.server(futures.ThreadPoolExecutor(4), options=LIMITS)
    stubs.add_ConformanceServicer_to_server(Plain(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    call(sys.argv[2]) if sys.argv[1] == "call" else serve()
