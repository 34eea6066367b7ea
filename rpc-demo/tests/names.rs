//! Nothing leads out: of the server's root, nor of the directory that `get` was given.

#![allow(clippy::unwrap_used)]

mod common;

use common::pb::object_store_client::ObjectStoreClient;
use common::pb::object_store_server::{ObjectStore, ObjectStoreServer};
use common::pb::put_request::Part;
use common::pb::{
    Digest, Entry, GetHeader, GetRequest, GetResponse, ListRequest, ListResponse, MakeDirectoryRequest,
    MakeDirectoryResponse, PutHeader, PutRequest, PutResponse, entry::Kind, get_response,
};
use common::*;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status, Streaming};

const BAD: [&str; 13] = [
    "..",
    "../evil",
    "a/../../evil",
    "a/..",
    ".",
    "/etc/passwd",
    "/",
    "a//b",
    "a/",
    "nul\0name",
    ".rpc-demo-tmp",
    ".rpc-demo-tmp/0.part",
    ".rpc-demo-tmp/lock",
];

async fn connect(server: &Server) -> ObjectStoreClient<Channel> {
    ObjectStoreClient::connect(server.url.clone()).await.unwrap()
}

fn parts(
    parts: impl IntoIterator<Item = Part>,
) -> impl futures_util::Stream<Item = PutRequest> + Send + 'static {
    let requests: Vec<_> = parts.into_iter().map(|part| PutRequest { part: Some(part) }).collect();
    tokio_stream::iter(requests)
}

fn header(name: &str) -> Part {
    Part::Header(PutHeader { name: name.into(), size: None, mode: None })
}

fn digest(bytes: &[u8]) -> Digest {
    Digest { size: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) }
}

#[tokio::test]
async fn a_client_that_checks_nothing_gets_nowhere() {
    let dir = scratch();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let server = Server::start(&root);
    let mut client = connect(&server).await;
    let long = ["x".repeat(256), "x/".repeat(2000) + "x"];
    for bad in BAD.iter().copied().chain(long.iter().map(String::as_str)) {
        let name = bad.to_owned();
        let put = parts([header(bad), Part::Chunk("evil".into()), Part::Trailer(digest(b"evil"))]);
        let refusals = [
            client.put(put).await.map(drop),
            client.get(GetRequest { name: name.clone(), chunk_size: 0 }).await.map(drop),
            client.list(ListRequest { name: name.clone() }).await.map(drop),
            client.make_directory(MakeDirectoryRequest { name }).await.map(drop),
        ];
        for refusal in refusals {
            let status = refusal.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{bad:?}: {status:?}");
            says(status.message(), &["cannot be the name of an object"]);
        }
    }
    assert_eq!(names(dir.path()), ["root"]);
    assert_eq!(names(&root), [".rpc-demo-tmp"]);
    assert_eq!(server.unfinished(), 0);
}

#[test]
fn the_command_line_says_what_is_wrong_with_a_name() {
    let dir = scratch();
    let server = Server::start(dir.path());
    // A NUL cannot be given on a command line.
    for bad in BAD.iter().filter(|bad| !bad.contains('\0')) {
        let line = failed(server.client(["put", "/dev/null", bad]), 2);
        says(&line, &[&format!("'{bad}' cannot be the name of an object: ")]);
        failed(server.client(["get", bad, "/nonexistent/x"]), 2);
    }
    failed(server.client(["ls", "../"]), 2);
}

#[tokio::test]
async fn links_under_the_root_do_not_lead_out() {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir_all(at("root/real")).unwrap();
    fs::create_dir(at("outside")).unwrap();
    fs::write(at("outside/secret"), "secret").unwrap();
    symlink(at("outside"), at("root/absolute")).unwrap();
    symlink("../outside", at("root/relative")).unwrap();
    symlink("../outside/secret", at("root/file")).unwrap();
    symlink("real", at("root/inside")).unwrap();
    let server = Server::start(&at("root"));
    let mut client = connect(&server).await;
    for name in ["absolute/secret", "relative/secret", "file", "inside/../../outside/secret"] {
        client.get(GetRequest { name: name.into(), chunk_size: 0 }).await.unwrap_err();
    }
    for name in ["absolute/new", "relative/new", "relative/new/deeper"] {
        let put = parts([header(name), Part::Chunk("evil".into()), Part::Trailer(digest(b"evil"))]);
        let status = client.put(put).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
        let made = client.make_directory(MakeDirectoryRequest { name: name.into() }).await;
        assert_eq!(made.unwrap_err().code(), Code::PermissionDenied);
    }
    // A put replaces the link itself.
    client.put(parts([header("file"), Part::Trailer(digest(b""))])).await.unwrap();
    assert!(fs::symlink_metadata(at("root/file")).unwrap().is_file());
    assert_eq!(fs::read(at("outside/secret")).unwrap(), b"secret");
    assert_eq!(names(&at("outside")), ["secret"]);
    // One that stays inside is followed.
    client.put(parts([header("inside/x"), Part::Trailer(digest(b""))])).await.unwrap();
    assert_eq!(names(&at("root/real")), ["x"]);
    assert_eq!(server.unfinished(), 0);
}

#[tokio::test]
async fn a_put_that_breaks_the_protocol_stores_nothing() {
    let dir = scratch();
    let server = Server::start(dir.path());
    let mut client = connect(&server).await;
    let chunk = || Part::Chunk("1234".into());
    let trailer = || Part::Trailer(digest(b"1234"));
    let sized = |size| Part::Header(PutHeader { name: "x".into(), size: Some(size), mode: None });
    let wrong = Digest { crc32c: 1, ..digest(b"1234") };
    let cases: [(Vec<Part>, Code, &str); 11] = [
        (vec![], Code::InvalidArgument, "begins with its header"),
        (vec![chunk(), trailer()], Code::InvalidArgument, "begins with its header"),
        (vec![header("x")], Code::Aborted, "'x' ended early"),
        (vec![header("x"), chunk()], Code::Aborted, "'x' ended early"),
        (vec![header("x"), chunk(), header("y"), trailer()], Code::InvalidArgument, "second header"),
        (vec![header("x"), chunk(), trailer(), chunk()], Code::InvalidArgument, "more after the trailer"),
        (vec![header("x"), chunk(), chunk(), trailer()], Code::DataLoss, "'x' arrived as 8 bytes"),
        (
            vec![header("x"), chunk(), Part::Trailer(wrong)],
            Code::DataLoss,
            "'x' arrived as 4 bytes with CRC32C",
        ),
        (vec![sized(3), chunk(), trailer()], Code::InvalidArgument, "announced with 3 bytes, and 4 came"),
        (vec![sized(5), chunk(), trailer()], Code::InvalidArgument, "announced with 5 bytes, and 4 came"),
        (
            vec![sized(u64::MAX), chunk(), trailer()],
            Code::ResourceExhausted,
            "'x': it has 18446744073709551615",
        ),
    ];
    for (sent, code, says_so) in cases {
        let shown = format!("{sent:?}");
        let status = client.put(parts(sent)).await.expect_err(&shown);
        assert_eq!(status.code(), code, "{shown}: {status:?}");
        says(status.message(), &[says_so]);
    }
    assert_eq!(names(dir.path()), [".rpc-demo-tmp"]);
    until("its temporary files are gone", || server.unfinished() == 0);
    // It lives on.
    client.put(parts([header("x"), chunk(), trailer()])).await.unwrap();
    assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"1234");
}

#[test]
fn a_local_name_that_is_not_utf8_is_named() {
    let dir = scratch();
    fs::create_dir_all(dir.path().join("tree/sub")).unwrap();
    fs::create_dir(dir.path().join("root")).unwrap();
    fs::write(dir.path().join("tree/good"), "x").unwrap();
    fs::write(dir.path().join("tree/sub").join(std::ffi::OsStr::from_bytes(b"bad\xff")), "x").unwrap();
    let server = Server::start(&dir.path().join("root"));
    let tree = dir.path().join("tree");
    let line = failed(server.client(["put".as_ref(), tree.as_os_str(), "t".as_ref()]), 1);
    says(&line, &["tree/sub/bad\u{fffd}", "not UTF-8", "rename it"]);
    // Said before anything was sent.
    assert_eq!(names(&dir.path().join("root")), [".rpc-demo-tmp"]);
}

/// A server that lies.
struct Liar {
    listed: Vec<Entry>,
    answer: Vec<get_response::Part>,
}

type Answers<T> = tokio_stream::Iter<std::vec::IntoIter<Result<T, Status>>>;

#[tonic::async_trait]
impl ObjectStore for Liar {
    type GetStream = Answers<GetResponse>;
    type ListStream = Answers<ListResponse>;

    async fn put(&self, request: Request<Streaming<PutRequest>>) -> Result<Response<PutResponse>, Status> {
        let mut stream = request.into_inner();
        while stream.message().await?.is_some() {}
        Ok(Response::new(PutResponse { stored: Some(Digest { size: 4, crc32c: 5 }) }))
    }

    async fn get(&self, _: Request<GetRequest>) -> Result<Response<Self::GetStream>, Status> {
        let parts: Vec<_> =
            self.answer.iter().map(|part| Ok(GetResponse { part: Some(part.clone()) })).collect();
        Ok(Response::new(tokio_stream::iter(parts)))
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let entries = self.listed.clone();
        Ok(Response::new(tokio_stream::iter(vec![Ok(ListResponse { entries })])))
    }

    async fn make_directory(
        &self,
        _: Request<MakeDirectoryRequest>,
    ) -> Result<Response<MakeDirectoryResponse>, Status> {
        Ok(Response::new(MakeDirectoryResponse {}))
    }
}

/// Runs a client against a [`Liar`].
async fn against(liar: Liar, args: &[&str]) -> std::process::Output {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serve = tonic::transport::Server::builder()
        .add_service(ObjectStoreServer::new(liar))
        .serve_with_incoming(TcpListenerStream::new(listener));
    let serve = tokio::spawn(serve);
    let mut client = program();
    client.args(args).args(["--server", &url]);
    let output = tokio::task::spawn_blocking(move || client.output().unwrap()).await.unwrap();
    serve.abort();
    output
}

fn entry(name: &str, kind: Kind) -> Entry {
    Entry { name: name.into(), kind: kind.into(), size: 4, note: String::new() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_cannot_make_get_write_elsewhere() {
    let dir = scratch();
    let copy = dir.path().join("copy");
    for evil in ["../evil", "t/../../evil", "/tmp/evil", "t2/evil", "t", "t/nul\0", "evil"] {
        for kind in [Kind::File, Kind::Directory] {
            let liar = Liar {
                listed: vec![entry("t", Kind::Directory), entry(evil, kind)],
                answer: vec![
                    get_response::Part::Header(GetHeader { size: 4, mode: 0o644 }),
                    get_response::Part::Chunk("evil".into()),
                    get_response::Part::Trailer(digest(b"evil")),
                ],
            };
            let line = failed(against(liar, &["get", "t", copy.to_str().unwrap()]).await, 1);
            says(&line, &["which is not below it"]);
            assert!(names(&copy).is_empty());
            assert_eq!(names(dir.path()), ["copy"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn links_in_the_target_do_not_lead_a_server_out() {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir(at("copy")).unwrap();
    fs::create_dir(at("outside")).unwrap();
    symlink(at("outside"), at("copy/link")).unwrap();
    let liar = Liar {
        listed: vec![entry("t", Kind::Directory), entry("t/link/evil", Kind::File)],
        answer: vec![
            get_response::Part::Header(GetHeader { size: 4, mode: 0o644 }),
            get_response::Part::Chunk("evil".into()),
            get_response::Part::Trailer(digest(b"evil")),
        ],
    };
    let line = failed(against(liar, &["get", "t", at("copy").to_str().unwrap()]).await, 1);
    says(&line, &["copy/link/evil"]);
    assert!(names(&at("outside")).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_does_not_add_up_leaves_no_file() {
    use get_response::Part;
    let dir = scratch();
    let target = dir.path().join("file");
    let header = || Part::Header(GetHeader { size: 4, mode: 0o644 });
    let chunk = || Part::Chunk("1234".into());
    let trailer = || Part::Trailer(digest(b"1234"));
    let wrong = || Part::Trailer(Digest { crc32c: 1, ..digest(b"1234") });
    let cases: [(Vec<Part>, &str); 9] = [
        (vec![header(), chunk(), wrong()], "4 bytes with CRC32C 00000001 was sent"),
        (vec![header(), chunk(), chunk(), trailer()], "8 bytes with CRC32C"),
        (vec![header(), trailer()], "0 bytes with CRC32C"),
        (vec![Part::Header(GetHeader { size: 5, mode: 0 }), chunk(), trailer()], "5 bytes were announced"),
        (vec![header(), chunk()], "ends without a trailer"),
        (vec![header(), chunk(), trailer(), chunk()], "more after the trailer"),
        (vec![header(), header(), chunk(), trailer()], "a second header"),
        (vec![chunk(), trailer()], "does not begin with a header"),
        (vec![], "does not begin with a header"),
    ];
    for (answer, says_so) in cases {
        let liar = Liar { listed: vec![entry("x", Kind::File)], answer };
        let line = failed(against(liar, &["get", "x", target.to_str().unwrap()]).await, 1);
        says(&line, &["cannot get 'x'", "file: ", says_so]);
        assert!(names(dir.path()).is_empty(), "{says_so}: {:?}", names(dir.path()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stored_something_else_is_found_out() {
    let dir = scratch();
    let file = dir.path().join("file");
    fs::write(&file, "1234").unwrap();
    let liar = Liar { listed: vec![], answer: vec![] };
    let line = failed(against(liar, &["put", file.to_str().unwrap(), "x"]).await, 1);
    says(&line, &["file as 'x'", "stored 4 bytes with CRC32C 00000005"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_cannot_play_with_the_terminal() {
    let liar = Liar { listed: vec![entry("a\u{1b}[2Jb\nc", Kind::File)], answer: vec![] };
    let output = ok(against(liar, &["ls"]).await);
    assert_eq!(stdout(&output), "               4  a\\u{1b}[2Jb\\nc\n");
}
