//! No name leads out of the server's root, or out of the directory given to `get`.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use common::pb::checksums_request::Of;
use common::pb::entry::Kind;
use common::pb::object_store_client::ObjectStoreClient;
use common::pb::object_store_server::{ObjectStore, ObjectStoreServer};
use common::pb::put_request::Head;
use common::pb::*;
use common::*;
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
    // tonic's own client, because the server has to check names from any caller.
    let endpoint = Channel::from_shared(server.url.clone()).unwrap();
    ObjectStoreClient::new(endpoint.connect().await.unwrap())
}

fn parts(
    parts: impl IntoIterator<Item = PutRequest>,
) -> impl futures_util::Stream<Item = PutRequest> + Send + 'static {
    tokio_stream::iter(parts.into_iter().collect::<Vec<_>>())
}

fn head(name: &str, size: Option<u64>) -> PutRequest {
    let head = ObjectHead { name: name.into(), size, attributes: None };
    PutRequest { head: Some(Head::Object(head)), ..PutRequest::default() }
}

fn data(bytes: &'static str) -> PutRequest {
    PutRequest { data: bytes.into(), ..PutRequest::default() }
}

fn end(digest: Digest) -> PutRequest {
    PutRequest { digest: Some(digest), ..PutRequest::default() }
}

/// A put in one message.
fn whole(name: &str, bytes: &'static str) -> PutRequest {
    PutRequest { data: bytes.into(), digest: Some(digest(bytes.as_bytes())), ..head(name, None) }
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
        let put = parts([head(bad, None), data("evil"), end(digest(b"evil"))]);
        let begin = BeginUploadRequest {
            name: name.clone(),
            size: 1,
            range_size: 1 << 20,
            ..Default::default()
        };
        let sums = ChecksumsRequest { of: Some(Of::Name(name.clone())), range_size: 1 << 20 };
        let refusals = [
            client.put(put).await.map(drop),
            client.put(parts([whole(bad, "evil")])).await.map(drop),
            client.get(GetRequest { name: name.clone(), ..Default::default() }).await.map(drop),
            client.list(ListRequest { name: name.clone(), ..Default::default() }).await.map(drop),
            client.stat(StatRequest { name: name.clone(), ..Default::default() }).await.map(drop),
            client.begin_upload(begin).await.map(drop),
            client.checksums(sums).await.map(drop),
            client
                .set_attributes(SetAttributesRequest { name: name.clone(), attributes: None })
                .await
                .map(drop),
            client.remove(RemoveRequest { name: name.clone(), recursive: true }).await.map(drop),
            client.make_directory(MakeDirectoryRequest { name, writable: true }).await.map(drop),
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
    // A command line cannot contain a NUL.
    for bad in BAD.iter().filter(|bad| !bad.contains('\0')) {
        let says_so = format!("'{bad}' cannot be the name of an object: ");
        // A '/' at the end means the directory to store it in.
        if !bad.ends_with('/') {
            says(&failed(server.client(["put", "/dev/null", bad]), 2), &[&says_so]);
            says(&failed(server.client(["cp", "x", bad]), 2), &[&says_so]);
        }
        for args in [["get", bad, "/nonexistent/x"].as_slice(), &["cp", bad, "x"]] {
            says(&failed(server.client(args), 2), &[&says_so]);
        }
    }
    for args in [
        ["put", "/dev/null", "../"].as_slice(),
        &["put", "..", "x/"],
        &["rm", ".."],
        &["stat", "/x"],
    ] {
        failed(server.client(args), 2);
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
        client.get(GetRequest { name: name.into(), ..Default::default() }).await.unwrap_err();
        let stat = client
            .stat(StatRequest { name: name.into(), checksum: Checksum::Computed.into() })
            .await;
        // The server may report that it is a link, but must not follow it.
        assert!(stat.is_err() || stat.unwrap().into_inner().entry.unwrap().kind() == Kind::Other);
        let attributes = Some(Attributes { mode: Some(0), modified: None });
        let set = SetAttributesRequest { name: name.into(), attributes };
        client.set_attributes(set).await.unwrap_err();
    }
    for name in ["absolute/new", "relative/new", "relative/new/deeper"] {
        let status = client.put(parts([whole(name, "evil")])).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
        let made =
            client.make_directory(MakeDirectoryRequest { name: name.into(), writable: true }).await;
        assert_eq!(made.unwrap_err().code(), Code::PermissionDenied);
    }
    let recursive = true;
    client.remove(RemoveRequest { name: "relative/secret".into(), recursive }).await.unwrap_err();
    // Removing and putting affect the link itself.
    client.remove(RemoveRequest { name: "absolute".into(), recursive }).await.unwrap();
    assert!(!at("root/absolute").is_symlink());
    client.put(parts([whole("file", "")])).await.unwrap();
    assert!(fs::symlink_metadata(at("root/file")).unwrap().is_file());
    assert_eq!(fs::read(at("outside/secret")).unwrap(), b"secret");
    assert_eq!(names(&at("outside")), ["secret"]);
    // A link whose target is inside the root is followed.
    client.put(parts([head("inside/x", None), end(digest(b""))])).await.unwrap();
    assert_eq!(names(&at("root/real")), ["x"]);
    assert_eq!(server.unfinished(), 0);
}

#[tokio::test]
async fn a_put_that_breaks_the_protocol_stores_nothing() {
    let dir = scratch();
    let server = Server::start(dir.path());
    let mut client = connect(&server).await;
    let chunk = || data("1234");
    let trailer = || end(digest(b"1234"));
    let header = |name| head(name, None);
    let sized = |size| head("x", Some(size));
    let wrong = Digest { crc32c: 1, ..digest(b"1234") };
    let evil = PutRequest { digest: Some(wrong), ..whole("x", "1234") };
    let short = PutRequest { digest: Some(digest(b"1234")), data: "1234".into(), ..sized(5) };
    let cases: [(Vec<PutRequest>, Code, &str); 14] = [
        (vec![], Code::InvalidArgument, "begins with its head"),
        (vec![chunk(), trailer()], Code::InvalidArgument, "begins with its head"),
        (vec![header("x")], Code::Aborted, "'x' ended early"),
        (vec![header("x"), chunk()], Code::Aborted, "'x' ended early"),
        (vec![header("x"), chunk(), header("y"), trailer()], Code::InvalidArgument, "second head"),
        (
            vec![header("x"), chunk(), trailer(), chunk()],
            Code::InvalidArgument,
            "more after its digest",
        ),
        (vec![whole("x", "1234"), chunk()], Code::InvalidArgument, "more after its digest"),
        (vec![header("x"), chunk(), chunk(), trailer()], Code::DataLoss, "'x' arrived as 8 bytes"),
        (
            vec![header("x"), chunk(), end(wrong)],
            Code::DataLoss,
            "'x' arrived as 4 bytes with CRC32C",
        ),
        (vec![evil], Code::DataLoss, "'x' arrived as 4 bytes with CRC32C"),
        (
            vec![sized(3), chunk(), trailer()],
            Code::InvalidArgument,
            "announced with 3 bytes, and 4 came",
        ),
        (
            vec![sized(5), chunk(), trailer()],
            Code::InvalidArgument,
            "announced with 5 bytes, and 4 came",
        ),
        (vec![short], Code::InvalidArgument, "announced with 5 bytes, and 4 came"),
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
    server.drops_all();
    // The server still works.
    client.put(parts([header("x"), chunk(), trailer()])).await.unwrap();
    assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"1234");
}

#[tokio::test]
async fn an_upload_that_breaks_the_protocol_stores_nothing() {
    const EACH: u64 = 64 << 10;
    let dir = scratch();
    let server = Server::start(dir.path());
    let mut client = connect(&server).await;
    let begin = |size, range_size| BeginUploadRequest {
        name: "x".into(),
        size,
        range_size,
        ..Default::default()
    };
    for (size, range_size) in [(10, 0), (10, 1), (u64::MAX, EACH), (10, u64::MAX)] {
        let status = client.begin_upload(begin(size, range_size)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    }
    let status = client.begin_upload(begin(1 << 52, 1 << 32)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert_eq!(server.unfinished(), 0);

    let upload = client.begin_upload(begin(EACH + 4, EACH)).await.unwrap().into_inner().upload;
    let range = |upload: &str, index| PutRequest {
        head: Some(Head::Range(RangeHead { upload: upload.into(), index })),
        ..PutRequest::default()
    };
    let trailer = || end(digest(b"1234"));
    let cases = [
        (vec![range("nonsense", 0), trailer()], Code::Aborted, "knows no such upload"),
        (
            vec![range(&upload, 2), trailer()],
            Code::InvalidArgument,
            "range 2 is none of the 2 ranges",
        ),
        (
            vec![range(&upload, u64::MAX), trailer()],
            Code::InvalidArgument,
            "is none of the 2 ranges",
        ),
        (
            vec![range(&upload, 1), data("12345")],
            Code::InvalidArgument,
            "announced with 4 bytes, and 5 came",
        ),
        (vec![range(&upload, 1), data("123"), trailer()], Code::InvalidArgument, "and 3 came"),
        (vec![range(&upload, 1), data("4321"), trailer()], Code::DataLoss, "arrived as 4 bytes"),
        (vec![range(&upload, 1), data("1234")], Code::Aborted, "ended early"),
    ];
    for (sent, code, says_so) in cases {
        let shown = format!("{sent:?}");
        let status = client.put(parts(sent)).await.expect_err(&shown);
        assert_eq!(status.code(), code, "{shown}: {status:?}");
        says(status.message(), &[says_so]);
    }
    client.put(parts([range(&upload, 1), data("1234"), trailer()])).await.unwrap();
    let finish = FinishUploadRequest { upload: upload.clone(), digest: Some(digest(b"")) };
    let status = client.finish_upload(finish).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    says(status.message(), &["1 of the 2 ranges of 'x' have not arrived"]);
    for (id, range_size) in [(&upload, EACH + 1), (&"nonsense".to_owned(), EACH)] {
        let request = ChecksumsRequest { of: Some(Of::Upload(id.clone())), range_size };
        client.checksums(request).await.unwrap_err();
    }
    client.checksums(ChecksumsRequest { of: None, range_size: EACH }).await.unwrap_err();
    assert_eq!(names(dir.path()), [".rpc-demo-tmp"]);
    client.abort_upload(AbortUploadRequest { upload: upload.clone() }).await.unwrap();
    client.abort_upload(AbortUploadRequest { upload }).await.unwrap_err();
    assert_eq!(server.unfinished(), 0);
}

#[test]
fn a_local_name_that_is_not_utf8_is_named() {
    let dir = scratch();
    fs::create_dir_all(dir.path().join("tree/sub")).unwrap();
    fs::create_dir(dir.path().join("root")).unwrap();
    fs::write(dir.path().join("tree/good"), "x").unwrap();
    fs::write(dir.path().join("tree/sub").join(std::ffi::OsStr::from_bytes(b"bad\xff")), "x")
        .unwrap();
    let server = Server::start(&dir.path().join("root"));
    let tree = dir.path().join("tree");
    let line = failed(server.client(["put".as_ref(), tree.as_os_str(), "t".as_ref()]), 1);
    says(&line, &["tree/sub/bad\u{fffd}", "not UTF-8", "rename it"]);
    // The error is reported before anything is sent.
    assert_eq!(names(&dir.path().join("root")), [".rpc-demo-tmp"]);
}

/// A malicious server.
struct Liar {
    listed: Vec<Entry>,
    answer: Vec<GetResponse>,
}

type Answers<T> = tokio_stream::Iter<std::vec::IntoIter<Result<T, Status>>>;
type Answer<T> = Result<Response<T>, Status>;

const STORED: Digest = Digest { size: 4, crc32c: 5 };

#[tonic::async_trait]
impl ObjectStore for Liar {
    type GetStream = Answers<GetResponse>;
    type ListStream = Answers<ListResponse>;
    type ChecksumsStream = Answers<ChecksumsResponse>;

    async fn put(&self, request: Request<Streaming<PutRequest>>) -> Answer<PutResponse> {
        let mut stream = request.into_inner();
        while stream.message().await?.is_some() {}
        Ok(Response::new(PutResponse { stored: Some(STORED) }))
    }

    async fn begin_upload(&self, _: Request<BeginUploadRequest>) -> Answer<BeginUploadResponse> {
        Ok(Response::new(BeginUploadResponse { upload: "x".into(), resumed: true }))
    }

    async fn finish_upload(&self, _: Request<FinishUploadRequest>) -> Answer<PutResponse> {
        Ok(Response::new(PutResponse { stored: Some(STORED) }))
    }

    async fn abort_upload(&self, _: Request<AbortUploadRequest>) -> Answer<AbortUploadResponse> {
        Ok(Response::new(AbortUploadResponse {}))
    }

    async fn get(&self, _: Request<GetRequest>) -> Answer<Self::GetStream> {
        let answer: Vec<_> = self.answer.iter().cloned().map(Ok).collect();
        Ok(Response::new(tokio_stream::iter(answer)))
    }

    async fn checksums(&self, _: Request<ChecksumsRequest>) -> Answer<Self::ChecksumsStream> {
        let answer = vec![Ok(ChecksumsResponse { crc32c: vec![1; 100] })];
        Ok(Response::new(tokio_stream::iter(answer)))
    }

    async fn stat(&self, _: Request<StatRequest>) -> Answer<StatResponse> {
        Ok(Response::new(StatResponse { entry: self.listed.first().cloned() }))
    }

    async fn list(&self, _: Request<ListRequest>) -> Answer<Self::ListStream> {
        let entries = self.listed.clone();
        Ok(Response::new(tokio_stream::iter(vec![Ok(ListResponse { entries })])))
    }

    async fn make_directory(
        &self,
        _: Request<MakeDirectoryRequest>,
    ) -> Answer<MakeDirectoryResponse> {
        Ok(Response::new(MakeDirectoryResponse {}))
    }

    async fn set_attributes(
        &self,
        _: Request<SetAttributesRequest>,
    ) -> Answer<SetAttributesResponse> {
        Ok(Response::new(SetAttributesResponse {}))
    }

    async fn remove(&self, _: Request<RemoveRequest>) -> Answer<RemoveResponse> {
        Ok(Response::new(RemoveResponse::default()))
    }
}

/// A response to a get, part by part.
fn got(size: u64) -> GetResponse {
    GetResponse {
        header: Some(GetHeader { size, ..GetHeader::default() }),
        ..GetResponse::default()
    }
}

fn got_data(bytes: &'static str) -> GetResponse {
    GetResponse { data: bytes.into(), ..GetResponse::default() }
}

fn got_end(digest: Digest) -> GetResponse {
    GetResponse { digest: Some(digest), ..GetResponse::default() }
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
    Entry { name: name.into(), kind: kind.into(), size: 4, ..Entry::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_cannot_make_get_write_elsewhere() {
    let dir = scratch();
    let copy = dir.path().join("copy");
    for evil in ["../evil", "t/../../evil", "/tmp/evil", "t2/evil", "t", "t/nul\0", "evil"] {
        for kind in [Kind::File, Kind::Directory] {
            let liar = Liar {
                listed: vec![entry("t", Kind::Directory), entry(evil, kind)],
                answer: vec![got(4), got_data("evil"), got_end(digest(b"evil"))],
            };
            let line = failed(against(liar, &["get", "t", copy.to_str().unwrap()]).await, 1);
            says(&line, &["which is not below it"]);
            assert!(names(dir.path()).is_empty());
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
        answer: vec![got(4), got_data("evil"), got_end(digest(b"evil"))],
    };
    let line = failed(against(liar, &["get", "t", at("copy").to_str().unwrap()]).await, 1);
    says(&line, &["copy/link/evil"]);
    assert!(names(&at("outside")).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_does_not_add_up_leaves_no_file() {
    let dir = scratch();
    let target = dir.path().join("file");
    let (header, chunk, trailer) = (|| got(4), || got_data("1234"), || got_end(digest(b"1234")));
    let wrong = || got_end(Digest { crc32c: 1, ..digest(b"1234") });
    let at_once = |digest| GetResponse { data: "1234".into(), digest: Some(digest), ..got(4) };
    let cases: [(Vec<GetResponse>, &str); 11] = [
        (vec![header(), chunk(), wrong()], "4 bytes with CRC32C 00000001 was sent"),
        (vec![at_once(Digest { crc32c: 1, size: 4 })], "4 bytes with CRC32C 00000001 was sent"),
        (vec![at_once(digest(b"1234")), chunk()], "more after its digest"),
        (vec![header(), chunk(), chunk(), trailer()], "8 bytes with CRC32C"),
        (vec![header(), trailer()], "0 bytes with CRC32C"),
        (vec![got(5), chunk(), trailer()], "5 bytes were announced"),
        (vec![header(), chunk()], "ends without a digest"),
        (vec![header(), chunk(), trailer(), chunk()], "more after its digest"),
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
async fn ranges_that_do_not_add_up_leave_no_file() {
    let dir = scratch();
    let target = dir.path().join("file");
    let large = || vec![Entry { size: 100 << 10, ..entry("x", Kind::File) }];
    let header = |version: &str| GetResponse {
        header: Some(GetHeader {
            size: 100 << 10,
            version: version.into(),
            crc32c: Some(7),
            ..Default::default()
        }),
        ..GetResponse::default()
    };
    let part = || GetResponse { data: vec![0; 64 << 10].into(), ..GetResponse::default() };
    let cases = [
        (vec![header("1"), got_data("1234"), got_end(digest(b"1234"))], "4 bytes with CRC32C"),
        (
            vec![header("1"), part(), got_data("1234"), got_end(digest(b"1234"))],
            "65540 bytes with CRC32C",
        ),
        (
            vec![got(4), got_data("1234"), got_end(digest(b"1234"))],
            "it was replaced while it was read",
        ),
    ];
    for (answer, says_so) in cases {
        let liar = Liar { listed: large(), answer };
        let args = ["get", "x", target.to_str().unwrap(), "--range-size", "64KiB"];
        says(&failed(against(liar, &args).await, 1), &["cannot get 'x'", says_so]);
        assert!(names(dir.path()).is_empty(), "{says_so}: {:?}", names(dir.path()));
    }
    // A server that sends more checksums than the file has ranges.
    let file = dir.path().join("large");
    fs::write(&file, vec![1; 100 << 10]).unwrap();
    let liar = Liar { listed: vec![], answer: vec![] };
    let args = ["put", file.to_str().unwrap(), "x", "--range-size", "64KiB", "--resume"];
    says(&failed(against(liar, &args).await, 1), &["large as 'x'", "more checksums than ranges"]);
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
