//! Status codes, messages and details: of refused calls, after messages, and from a handler that
//! reads.

use tokio_stream::StreamExt;
use tonic::{Code, Status};
use tonic_rdma_tests::harness::{Client, TestEnv};
use tonic_rdma_tests::pb::{Message, Step};
use tonic_rdma_tests::service::script::{
    before, fail_with, payload, receive, receive_all, send, steps,
};

cases![
    every_code,
    ok_is_not_an_error,
    messages_of_any_text,
    binary_details,
    long_message_and_details,
    error_while_reading_requests,
];

/// Returns the statuses of calls that end with `step`, for each position of the step in a call.
async fn statuses(client: &mut Client, step: Step) -> Vec<(&'static str, Status)> {
    let refused = before("", [step.clone()]);
    let mut all = vec![
        ("unary", client.unary(refused.clone()).await.unwrap_err()),
        ("download", client.download(refused.clone()).await.unwrap_err()),
        ("upload", client.upload(tokio_stream::once(refused.clone())).await.unwrap_err()),
        ("chat", client.chat(tokio_stream::once(refused)).await.unwrap_err()),
    ];
    let late = steps("", [send(1, 100), step.clone()]);
    let mut replies = client.download(late).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 100);
    all.push(("after a message", replies.message().await.unwrap_err()));
    let mut replies =
        client.chat(tokio_stream::once(steps("", [step]))).await.unwrap().into_inner();
    all.push(("after the head", replies.message().await.unwrap_err()));
    all
}

async fn check(client: &mut Client, code: Code, message: &str, details: &[u8]) {
    let step = fail_with(code, message, details, &[]);
    for (position, status) in statuses(client, step).await {
        assert_eq!(status.code(), code, "{position}");
        assert_eq!(status.message(), message, "{position}");
        assert_eq!(status.details(), details, "{position}");
    }
}

async fn every_code(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for code in 1..=16 {
        let code = Code::from(code);
        check(&mut client, code, &format!("{code:?} it is"), b"").await;
        check(&mut client, code, "", b"").await;
    }
}

async fn ok_is_not_an_error(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let mut replies = client.download(steps("", [send(1, 1)])).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 1);
    assert_eq!(replies.message().await.unwrap(), None);
    // Polling again after the end returns no message.
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn messages_of_any_text(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for message in [
        "naïve café",
        "日本語のエラー",
        "🦀 emoji",
        "100% sure, 50%25",
        "tab\tand\nnewline\r\n",
        "quotes \" ' ` and \\ { } < > # ?",
        " spaces around ",
        "\u{7f}\u{1}",
    ] {
        check(&mut client, Code::Internal, message, b"").await;
    }
}

async fn binary_details(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let every: Vec<u8> = (0..=255).collect();
    for details in [&b"\0"[..], &b"\xff\xfe"[..], &b"abc"[..], &every[..]] {
        check(&mut client, Code::FailedPrecondition, "details", details).await;
    }
}

async fn long_message_and_details(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let message = "long ".repeat(800);
    check(&mut client, Code::Unknown, &message, b"").await;
    check(&mut client, Code::Unknown, "long", &[7; 6000]).await;
}

async fn error_while_reading_requests(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let step = fail_with(Code::ResourceExhausted, "three suffice", b"d", &[]);
    let stream = |first: Message| {
        tokio_stream::once(first).chain(tokio_stream::iter((2..=5).map(|s| payload(s, 10))))
    };
    let three = steps("", [receive(3), step.clone()]);
    let all = steps("", [receive_all(), step]);
    for first in [three, all] {
        let upload = client.upload(stream(first.clone())).await.unwrap_err();
        let mut replies = client.chat(stream(first)).await.unwrap().into_inner();
        let chat = replies.message().await.unwrap_err();
        for status in [upload, chat] {
            assert_eq!(status.code(), Code::ResourceExhausted);
            assert_eq!(status.message(), "three suffice");
            assert_eq!(status.details(), b"d");
        }
    }
}
