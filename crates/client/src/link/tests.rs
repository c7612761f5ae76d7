use std::time::Duration;

use kvferry_control::{Answer, Event, FrameReader, FrameWriter, MAX_FRAME, Report, Side};
use kvferry_handshake::{Envelope, Identity, PageLists, Ready, Role, TokenRange, decode};
use tempfile::TempDir;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::*;
use crate::tracer;
use crate::{Client, FetchRequest, PublishRequest, Rank, SealedMemory, TransferId};

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

/// The next call, and its number.
async fn call(stream: &UnixStream) -> (u64, Call) {
    match hear(stream).await {
        Request::Call { number, call } => (number, call),
        Request::Hello(_) => panic!("Hello came twice"),
    }
}

async fn answer(stream: &UnixStream, number: u64, answer: Result<Answer, Fault>) {
    say(stream, &Response::Answer { number, answer }).await;
}

/// Hears a call and says that it is done.
async fn accept(stream: &UnixStream) -> Call {
    let (number, call) = call(stream).await;
    let done = match call {
        Call::Register { region, .. } => Answer::Registered {
            generation: u64::from(region),
            paths: Vec::new(),
        },
        _ => Answer::Done,
    };
    answer(stream, number, Ok(done)).await;
    call
}

/// Registers regions of these numbers.
async fn register(rank: &Rank, stream: &UnixStream, regions: &[u16]) {
    let memory = SealedMemory::create("pool", 4096).unwrap();
    for region in regions {
        let registering = rank.register(*region, memory.region().unwrap());
        let (registered, _) = tokio::join!(registering, accept(stream));
        registered.unwrap();
    }
}

fn is_attach(call: &Call) -> bool {
    matches!(call, Call::Attach { .. })
}

fn is_register(call: &Call, number: u16) -> bool {
    matches!(call, Call::Register { region, .. } if *region == number)
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

#[tokio::test]
async fn while_a_parting_daemon_fences_calls_are_refused_and_a_region_is_not_let_go() {
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    register(&rank, &stream, &[0]).await;
    let parting = Fault::new(Code::Shutdown, "the daemon is shutting down");
    say(&stream, &Response::Hello(Err(parting))).await;
    // Until the client has read it, a call is sent, and lost.
    let refused = loop {
        match tokio::time::timeout(Duration::from_millis(50), rank.status()).await {
            Ok(answer) => break answer.unwrap_err(),
            Err(_) => continue,
        }
    };
    assert!(
        matches!(refused, ClientError::DaemonAway { .. }) && refused.can_retry(),
        "{refused}"
    );
    assert!(refused.to_string().contains("shutting down"), "{refused}");
    let unregistering = rank.unregister(0);
    tokio::pin!(unregistering);
    let early = tokio::time::timeout(Duration::from_millis(50), &mut unregistering).await;
    assert!(early.is_err(), "the daemon may still read it: {early:?}");
    drop(stream);
    unregistering.await.unwrap();
}

#[tokio::test]
async fn while_a_daemon_that_is_back_takes_back_what_it_had_calls_are_refused() {
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    register(&rank, &stream, &[3, 4, 5]).await;
    drop(stream);
    let stream = daemon.greet().await;
    let (number, attach) = call(&stream).await;
    assert!(is_attach(&attach));
    for refused in [
        rank.publish(publish("t")).await.map(drop),
        rank.abort(&"t".into()).await,
        rank.reattach().await,
        rank.status().await.map(drop),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(error, ClientError::Resuming { .. }), "{error}");
        assert!(error.can_retry());
    }
    // It does not have this one yet, and is not given it.
    rank.unregister(4).await.unwrap();
    answer(&stream, number, Ok(Answer::Done)).await;
    assert!(is_register(&accept(&stream).await, 3));
    let (number, last) = call(&stream).await;
    assert!(is_register(&last, 5));
    let early = tokio::time::timeout(Duration::ZERO, rank.ready()).await;
    assert!(early.is_err(), "the last region is not registered: {early:?}");
    let registered = Answer::Registered {
        generation: 9,
        paths: Vec::new(),
    };
    answer(&stream, number, Ok(registered)).await;
    rank.ready().await.unwrap();
    let (published, call) = tokio::join!(rank.publish(publish("t")), accept(&stream));
    published.unwrap();
    let Call::Publish(publish) = call else {
        panic!("{call:?}");
    };
    assert_eq!(publish.generations, [(3, 3), (5, 9)]);
}

/// Here the daemon is this very process. No other test registers memory of a process.
#[tokio::test]
async fn a_daemon_is_named_before_it_hears_of_process_memory_and_again_when_it_is_back() {
    let own = rustix::process::getpid();
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    register(&rank, &stream, &[0]).await;
    assert_eq!(tracer::naming(own), 0, "a memfd needs no name");
    let memory = [0u8; 64];
    let (address, len) = (memory.as_ptr().addr() as u64, 64);
    let registering = rank.register(1, crate::RegionMemory::Process { address, len });
    let hearing = async {
        let heard = accept(&stream).await;
        (heard, tracer::naming(own))
    };
    let (registered, (heard, named)) = tokio::join!(registering, hearing);
    registered.unwrap();
    assert!(is_register(&heard, 1), "{heard:?}");
    assert_eq!(named, 1);
    let mut notices = rank.notices();
    drop(stream);
    assert_eq!(notices.next().await, Some(Notice::DaemonLost));
    let stream = daemon.greet().await;
    assert_eq!(
        tracer::naming(own),
        0,
        "the connection is gone, and its daemon may be"
    );
    assert!(is_attach(&accept(&stream).await));
    assert!(is_register(&accept(&stream).await, 0));
    assert!(is_register(&call(&stream).await.1, 1));
    assert_eq!(tracer::naming(own), 1);
}

#[tokio::test]
async fn attaching_again_goes_on_where_it_failed() {
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    register(&rank, &stream, &[0, 1]).await;
    let mut notices = rank.notices();
    let cause = Fault::new(Code::RanksDisagree, "identity.model differs");
    say(&stream, &Response::Event(Event::Detached { cause })).await;
    notices.next().await.unwrap();
    let mended = async {
        assert!(is_attach(&accept(&stream).await));
        assert!(is_register(&accept(&stream).await, 0));
        let (number, second) = call(&stream).await;
        assert!(is_register(&second, 1));
        let full = Fault::new(Code::OverLimit, "no room");
        answer(&stream, number, Err(full)).await;
    };
    let (refused, ()) = tokio::join!(rank.reattach(), mended);
    assert!(refused.unwrap_err().can_retry());
    let (again, call) = tokio::join!(rank.reattach(), accept(&stream));
    again.unwrap();
    assert!(is_register(&call, 1), "{call:?}");
    rank.ready().await.unwrap();
}

#[tokio::test]
async fn a_daemon_that_is_back_and_refuses_is_tried_again_and_the_engine_told() {
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    let mut notices = rank.notices();
    drop(stream);
    let stream = daemon.greet().await;
    let (number, _) = call(&stream).await;
    let taken = Fault::new(Code::RankAttached, "rank 0 is attached");
    answer(&stream, number, Err(taken.clone())).await;
    let stream = daemon.greet().await;
    accept(&stream).await;
    rank.ready().await.unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(notices.next().await.unwrap());
    }
    assert_eq!(seen[..2], [Notice::DaemonLost, Notice::Refused { cause: taken }]);
    assert!(matches!(seen[2], Notice::DaemonBack { .. }), "{seen:?}");
}

#[tokio::test]
async fn a_lost_daemon_ends_transfers_with_peer_phase_and_bytes() {
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    let (publication, _) = tokio::join!(rank.publish(publish("p")), accept(&stream));
    let (waiting, _) = tokio::join!(rank.publish(publish("w")), accept(&stream));
    let (fetching, _) = tokio::join!(rank.fetch(fetch("f")), accept(&stream));
    let matched = Event::Matched {
        transfer: "p".into(),
        engine: "d".to_owned(),
        held: 0,
    };
    say(&stream, &Response::Event(matched)).await;
    for (side, transfer) in [(Side::Publish, "p"), (Side::Fetch, "f")] {
        let progress = Event::Progress {
            side,
            transfer: transfer.into(),
            bytes: 1,
            total: 2,
        };
        say(&stream, &Response::Event(progress)).await;
    }
    drop(stream);
    let causes = [
        (
            publication.unwrap().ended().await,
            "[publish, moving to engine d; 1 of 2 bytes done",
        ),
        (
            waiting.unwrap().ended().await,
            "[publish, waiting for a decode engine; no bytes done",
        ),
        (
            fetching.unwrap().ended().await,
            "[fetch from kvferry://n:1/e; 1 of 2 bytes done",
        ),
    ];
    for (end, words) in causes {
        let cause = end.unwrap_err().cause;
        assert_eq!(cause.code, Code::DaemonRestarted);
        assert!(cause.message.contains(words), "{cause}");
    }
}

/// Longer than any step of a test takes; what is said to be bounded ends long before.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(100);

#[tokio::test]
async fn opening_takes_no_longer_than_it_was_given() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mute.sock");
    // Connections are accepted by the kernel, and nobody says anything.
    let _mute = UnixListener::bind(&path).unwrap();
    for patience in [Duration::ZERO, SHORT] {
        // Less than the greeting alone would be given.
        let opened = tokio::time::timeout(HELLO_PATIENCE / 2, Client::connect_within(&path, patience)).await;
        let error = opened.expect("bounded by what it was given").unwrap_err();
        let text = error.to_string();
        assert!(
            error.can_retry() && text.contains("mute.sock") && text.contains("not greeted"),
            "{text}"
        );
    }
    // The longest there is, is no instant that could be reached.
    let away = directory.path().join("none.sock");
    let waiting = Client::connect_within(&away, Duration::MAX);
    assert!(tokio::time::timeout(SHORT, waiting).await.is_err());
}

#[tokio::test]
async fn a_call_that_is_not_answered_ends_with_its_name_and_may_take_effect_later() {
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    let impatient = rank.clone().patience(SHORT);
    let memory = SealedMemory::create("pool", 4096).unwrap();
    let registering = impatient.register(3, memory.region().unwrap());
    let error = tokio::time::timeout(LONG, registering)
        .await
        .unwrap()
        .unwrap_err();
    assert!(!error.can_retry(), "what it did is not known: {error}");
    let text = error.to_string();
    for word in [
        "register",
        "kvferryd.sock",
        "0.1 s",
        "stopped or stuck",
        "unregister",
    ] {
        assert!(text.contains(word), "{word} is missing: {text}");
    }
    // The answer comes late: the daemon has the region, and page lists state its generation.
    accept(&stream).await;
    // Answers are read in order.
    let id = TransferId::from("other");
    let (aborted, _) = tokio::join!(rank.abort(&id), accept(&stream));
    aborted.unwrap();
    let (published, call) = tokio::join!(rank.publish(publish("t")), accept(&stream));
    published.unwrap();
    assert!(
        matches!(&call, Call::Publish(publish) if publish.generations == [(3, 3)]),
        "{call:?}"
    );
}

#[tokio::test]
async fn every_call_is_bounded() {
    let daemon = Daemon::new();
    let (rank, stream) = daemon.rank().await;
    let rank = rank.patience(SHORT);
    let id = TransferId::from("t");
    let name = |error: ClientError| match error {
        ClientError::Unanswered { call, .. } => call,
        other => panic!("{other}"),
    };
    let calls = async {
        [
            name(rank.status().await.unwrap_err()),
            name(rank.publish(publish("t")).await.unwrap_err()),
            name(rank.fetch(fetch("t")).await.unwrap_err()),
            name(rank.abort(&id).await.unwrap_err()),
            name(rank.expect("kvferry://n:1/e", &id).await.unwrap_err()),
            name(rank.decline("kvferry://n:1/e", &id).await.unwrap_err()),
            name(rank.unregister(0).await.unwrap_err()),
        ]
    };
    let names = [
        "status",
        "publish",
        "fetch",
        "abort",
        "expect",
        "decline",
        "unregister",
    ];
    assert_eq!(tokio::time::timeout(LONG, calls).await.unwrap(), names);
    drop(stream);
    let (client, _stream) = daemon.client().await;
    let attaching = client.patience(SHORT).attach(envelope(), 0, None);
    let error = tokio::time::timeout(LONG, attaching).await.unwrap().unwrap_err();
    assert_eq!(name(error), "attach");
}

/// A daemon that reads nothing fills the socket, then what the task may queue, then the commands: a call is bounded there too.
#[tokio::test]
async fn a_call_that_cannot_even_be_sent_is_bounded() {
    let daemon = Daemon::new();
    let (rank, _stream) = daemon.rank().await;
    let rank = rank.patience(SHORT);
    let mut large = publish("t");
    large.metadata = Some(vec![0; 1 << 16]);
    let calls = (0..2 * COMMANDS).map(|_| {
        let (rank, large) = (rank.clone(), large.clone());
        tokio::spawn(async move { rank.publish(large).await })
    });
    for call in calls.collect::<Vec<_>>() {
        let ended = tokio::time::timeout(LONG, call).await.unwrap().unwrap();
        assert!(matches!(ended, Err(ClientError::Unanswered { .. })));
    }
}
