"""gRPC's interoperability tests in Python: `cases.py call ADDR` or `cases.py serve`.

The names and numbers are those of
https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md. `run` puts the module that
protoc makes of testing.proto where this finds it.
"""

import sys
import threading

import grpc
import testing_pb2 as pb
from common import endless, serve_methods

SERVICE = "grpc.testing.TestService"
REQUESTS, RESPONSES = (27182, 8, 1828, 45904), (31415, 9, 2653, 58979)
LARGE_REQUEST, LARGE_RESPONSE = 271828, 314159
INITIAL, TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"


def zeros(size):
    return pb.Payload(body=bytes(size))


def turn(request, response, interval_us=0):
    parameters = pb.ResponseParameters(size=response, interval_us=interval_us)
    return pb.StreamingOutputCallRequest(response_parameters=[parameters], payload=zeros(request))


class Cases:
    def __init__(self, channel):
        def method(kind, name, response, service=SERVICE):
            return kind(
                f"/{service}/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=response.FromString,
            )

        self.empty = method(channel.unary_unary, "EmptyCall", pb.Empty)
        self.unary = method(channel.unary_unary, "UnaryCall", pb.SimpleResponse)
        self.output = method(channel.unary_stream, "StreamingOutputCall", pb.StreamingOutputCallResponse)
        self.input = method(channel.stream_unary, "StreamingInputCall", pb.StreamingInputCallResponse)
        self.duplex = method(channel.stream_stream, "FullDuplexCall", pb.StreamingOutputCallResponse)
        self.no_method = method(channel.unary_unary, "UnimplementedCall", pb.Empty)
        self.no_service = method(
            channel.unary_unary, "UnimplementedCall", pb.Empty, "grpc.testing.UnimplementedService"
        )

    def empty_unary(self):
        assert self.empty(pb.Empty()) == pb.Empty()

    def large_unary(self):
        request = pb.SimpleRequest(response_size=LARGE_RESPONSE, payload=zeros(LARGE_REQUEST))
        assert self.unary(request).payload == zeros(LARGE_RESPONSE)

    def client_streaming(self):
        requests = (pb.StreamingInputCallRequest(payload=zeros(size)) for size in REQUESTS)
        assert self.input(requests).aggregated_payload_size == 74922

    def server_streaming(self):
        parameters = [pb.ResponseParameters(size=size) for size in RESPONSES]
        responses = self.output(pb.StreamingOutputCallRequest(response_parameters=parameters))
        assert [response.payload for response in responses] == [zeros(size) for size in RESPONSES]

    def ping_pong(self):
        answered = threading.Semaphore(1)

        def one_by_one():
            for request, response in zip(REQUESTS, RESPONSES):
                answered.acquire()
                yield turn(request, response)

        sizes = []
        for response in self.duplex(one_by_one()):
            sizes.append(len(response.payload.body))
            answered.release()
        assert tuple(sizes) == RESPONSES, sizes

    def empty_stream(self):
        assert list(self.duplex(iter([]))) == []

    def custom_metadata(self):
        metadata = ((INITIAL, "test_initial_metadata_value"), (TRAILING, b"\xab\xab\xab"))

        def echoed(call):
            assert dict(call.initial_metadata())[INITIAL] == metadata[0][1], call.initial_metadata()
            assert dict(call.trailing_metadata())[TRAILING] == metadata[1][1], call.trailing_metadata()

        request = pb.SimpleRequest(response_size=LARGE_RESPONSE, payload=zeros(LARGE_REQUEST))
        echoed(self.unary.with_call(request, metadata=metadata)[1])
        call = self.duplex(iter([turn(LARGE_REQUEST, LARGE_RESPONSE)]), metadata=metadata)
        assert [len(response.payload.body) for response in call] == [LARGE_RESPONSE]
        echoed(call)

    def refused(self, message):
        status = pb.EchoStatus(code=2, message=message)
        for call in (
            lambda: self.unary(pb.SimpleRequest(response_status=status)),
            lambda: list(self.duplex(iter([pb.StreamingOutputCallRequest(response_status=status)]))),
        ):
            error = failure(call)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, message), error

    def status_code_and_message(self):
        self.refused("test status message")

    def special_status_message(self):
        self.refused(SPECIAL)

    def unimplemented_method(self):
        error = failure(lambda: self.no_method(pb.Empty()))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error

    def unimplemented_service(self):
        error = failure(lambda: self.no_service(pb.Empty()))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error

    def cancel_after_begin(self):
        call = self.input.future(endless([]))
        call.cancel()
        assert call.code() == grpc.StatusCode.CANCELLED, call.code()

    def cancel_after_first_response(self):
        responses = self.duplex(endless([turn(REQUESTS[0], RESPONSES[0])]))
        assert len(next(responses).payload.body) == RESPONSES[0]
        responses.cancel()
        assert failure(lambda: list(responses)).code() == grpc.StatusCode.CANCELLED

    def timeout_on_sleeping_server(self):
        requests = endless([turn(REQUESTS[0], RESPONSES[0], interval_us=60_000_000)])
        error = failure(lambda: list(self.duplex(requests, timeout=0.001)))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error


def failure(call):
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call should have failed")


NAMES = [
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "custom_metadata",
    "status_code_and_message",
    "special_status_message",
    "unimplemented_method",
    "unimplemented_service",
    "cancel_after_begin",
    "cancel_after_first_response",
    "timeout_on_sleeping_server",
]


def call(addr):
    cases = Cases(grpc.insecure_channel(addr))
    for name in NAMES:
        getattr(cases, name)()
    # The connection and the server stand after the cases that end calls early.
    cases.empty_unary()
    print(f"gRPC's cases: {', '.join(NAMES)}: ok")


class Test:
    def UnaryCall(self, request, context):
        refuse(request.response_status, context)
        echo(context)
        return pb.SimpleResponse(payload=zeros(request.response_size))

    def StreamingOutputCall(self, request, context):
        refuse(request.response_status, context)
        for parameters in request.response_parameters:
            threading.Event().wait(parameters.interval_us / 1e6)
            yield pb.StreamingOutputCallResponse(payload=zeros(parameters.size))

    def StreamingInputCall(self, requests, context):
        size = sum(len(request.payload.body) for request in requests)
        return pb.StreamingInputCallResponse(aggregated_payload_size=size)

    def FullDuplexCall(self, requests, context):
        echo(context)
        for request in requests:
            yield from self.StreamingOutputCall(request, context)


def refuse(status, context):
    if status.code:
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        context.abort(code, status.message)


def echo(context):
    metadata = dict(context.invocation_metadata())
    if INITIAL in metadata:
        context.send_initial_metadata([(INITIAL, metadata[INITIAL])])
    if TRAILING in metadata:
        context.set_trailing_metadata([(TRAILING, metadata[TRAILING])])


def serve():
    def method(kind, behavior, request):
        return kind(
            behavior,
            request_deserializer=request.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    test = Test()
    output = pb.StreamingOutputCallRequest
    methods = {
        "EmptyCall": method(grpc.unary_unary_rpc_method_handler, lambda request, context: pb.Empty(), pb.Empty),
        "UnaryCall": method(grpc.unary_unary_rpc_method_handler, test.UnaryCall, pb.SimpleRequest),
        "StreamingOutputCall": method(grpc.unary_stream_rpc_method_handler, test.StreamingOutputCall, output),
        "StreamingInputCall": method(
            grpc.stream_unary_rpc_method_handler, test.StreamingInputCall, pb.StreamingInputCallRequest
        ),
        "FullDuplexCall": method(grpc.stream_stream_rpc_method_handler, test.FullDuplexCall, output),
    }
    serve_methods(SERVICE, methods)


if __name__ == "__main__":
    call(sys.argv[2]) if sys.argv[1] == "call" else serve()
