use kvferry_control::{FrameReader, FrameWriter, MAX_FRAME, Report, Side};
use kvferry_handshake::{Envelope, Identity, PageLists, Ready, Role, TokenRange, decode};
use tempfile::TempDir;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::*;
use crate::{Client, FetchRequest, PublishRequest, Rank};

/// A daemon that says what the test has it say.
struct Daemon {
    directory: TempDir,
    listener: UnixListener,
}

impl Daemon {
    fn new() -> Daemon {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("kvferryd.sock")).unwrap();
        Daemon { directory, listener }
    }

    /// Takes a connection and greets.
    async fn greet(&self) -> UnixStream {
        let (stream, _) = self.listener.accept().await.unwrap();
        hear(&stream).await;
        let welcome = Welcome {
            version: 1,
            incarnation: 1,
            address: "n:1".to_owned(),
            release: "0".to_owned(),
        };
        say(&stream, &Response::Hello(Ok(welcome))).await;
        stream
    }

    async fn client(&self) -> (Client, UnixStream) {
        let path = self.directory.path().join("kvferryd.sock");
        let (client, stream) = tokio::join!(Client::connect(path), self.greet());
        (client.unwrap(), stream)
    }

    async fn rank(&self) -> (Rank, UnixStream) {
        let (client, stream) = self.client().await;
        let attach = client.attach(envelope(), 0, None);
        let (rank, _) = tokio::join!(attach, accept(&stream));
        (rank.unwrap(), stream)
    }
}

async fn hear(stream: &UnixStream) -> Request {
    let mut reader = FrameReader::new(MAX_FRAME);
    let read = stream.async_io(Interest::READABLE, || reader.read(stream));
    let frame = read.await.unwrap().unwrap().unwrap();
    decode(&frame.payload).unwrap()
}

async fn say(stream: &UnixStream, response: &Response) {
    let mut writer = FrameWriter::new();
    writer.push(encode(response).unwrap(), None).unwrap();
    let written = stream.async_io(Interest::WRITABLE, || writer.write(stream));
    written.await.unwrap();
}

/// Hears a call and says that it is done.
async fn accept(stream: &UnixStream) -> Call {
    let Request::Call { number, call } = hear(stream).await else {
        panic!("no call");
    };
    let answer = Ok(Answer::Done);
    say(stream, &Response::Answer { number, answer }).await;
    call
}

/// As much of an engine as a daemon that does not look needs.
fn envelope() -> Envelope {
    Envelope {
        identity: Identity {
            engine: "e".into(),
            role: Role::Both,
            incarnation: 1,
            model: "tiny".into(),
            revision: None,
            weights_digest: None,
            config_digest: None,
            framework: "test".into(),
            framework_version: "1".into(),
            prefill_context_parallel: 1,
        },
        page_groups: Vec::new(),
        components: Vec::new(),
        ranks: Vec::new(),
    }
}

fn publish(id: &str) -> PublishRequest {
    PublishRequest {
        transfer: id.into(),
        pages: Some(PageLists { groups: Vec::new() }),
        ready: Ready::complete(4),
        metadata: None,
        serves: 1,
    }
}

fn fetch(id: &str) -> FetchRequest {
    FetchRequest {
        source: "kvferry://n:1/e".to_owned(),
        transfer: id.into(),
        pages: PageLists { groups: Vec::new() },
        tokens: TokenRange { from: 0, to: 4 },
        least: 4,
    }
}

fn delivered(side: Side, id: &str) -> Response {
    Response::Event(Event::Delivered {
        side,
        transfer: id.into(),
        tokens: 4,
        metadata: Vec::new(),
        report: Report::default(),
    })
}

#[tokio::test]
async fn a_rank_on_both_sides_of_a_transfer_is_told_each_end_for_itself() {
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    let (publication, _) = tokio::join!(rank.publish(publish("t")), accept(&stream));
    let (fetching, _) = tokio::join!(rank.fetch(fetch("t")), accept(&stream));
    let (publication, fetching) = (publication.unwrap(), fetching.unwrap());
    let progress = Event::Progress {
        side: Side::Fetch,
        transfer: "t".into(),
        bytes: 1,
        total: 2,
    };
    say(&stream, &Response::Event(progress)).await;
    say(&stream, &delivered(Side::Fetch, "t")).await;
    assert_eq!(fetching.ended().await.unwrap().tokens, 4);
    assert_eq!(fetching.progress().bytes, 1);
    // What was said before it is known, too: of the publish, nothing.
    assert_eq!(publication.progress().bytes, 0);
    let ended = tokio::time::timeout(Duration::ZERO, publication.ended()).await;
    assert!(ended.is_err(), "the publish's pages are not fenced: {ended:?}");
    say(&stream, &delivered(Side::Publish, "t")).await;
    publication.ended().await.unwrap();
}

#[tokio::test]
async fn what_is_under_way_ends_when_a_parting_daemon_closes_and_not_before() {
    let daemon = Daemon::new();
    let (client, stream) = daemon.client().await;
    let call = tokio::spawn(async move { client.status().await });
    hear(&stream).await;
    let parting = Fault::new(Code::OverLimit, "events were not read");
    say(&stream, &Response::Hello(Err(parting))).await;
    // The daemon still fences.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!call.is_finished());
    drop(stream);
    let refused = call.await.unwrap().unwrap_err();
    let ClientError::Refused(fault) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(fault.code, Code::DaemonRestarted);
    assert!(fault.message.contains("events were not read"), "{fault}");
}
