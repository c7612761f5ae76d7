//! What engines may do on the socket, and what is refused.

use std::os::fd::AsFd;
use std::time::Duration;

use kvferry_client::{Client, ClientError, Event, Notice, RegionMemory, SealedMemory};
use kvferry_handshake::Code;

use crate::process::Program;
use crate::rig::{Engine, MEMORY, Node, envelope, soon, split};

fn code(error: ClientError) -> Code {
    match error {
        ClientError::Refused(fault) => fault.code,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn memory_that_is_no_sealed_memfd_is_refused_and_nothing_is_left() {
    let node = Node::start(&[]);
    let client = soon("connecting", Client::connect(node.socket())).await.unwrap();
    let rank = client.attach(envelope("e"), 0, None).await.unwrap();
    let (reading, _writing) = std::io::pipe().unwrap();
    let pipe = RegionMemory::Memfd {
        fd: reading.into(),
        offset: 0,
        len: MEMORY,
    };
    assert_eq!(code(rank.register(0, pipe).await.unwrap_err()), Code::RegionKind);
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, MEMORY).unwrap();
    let unsealed = RegionMemory::Memfd {
        fd: unsealed,
        offset: 0,
        len: MEMORY,
    };
    assert_eq!(
        code(rank.register(0, unsealed).await.unwrap_err()),
        Code::RegionSeals
    );
    let short = SealedMemory::create("short", 4096).unwrap();
    assert_eq!(
        code(rank.register(0, short.region().unwrap()).await.unwrap_err()),
        Code::RegionTooSmall
    );
    let beyond = short.region_of(0, MEMORY).unwrap();
    assert_eq!(
        code(rank.register(0, beyond).await.unwrap_err()),
        Code::RegionOutOfBounds
    );
    node.settles("data_regions", 0).await;
}

#[tokio::test]
async fn a_region_can_be_taken_back_and_given_again() {
    let node = Node::start(&[]);
    let engine = Engine::attach(node.socket(), "e").await;
    assert_eq!(node.count("data_regions").await, 1);
    soon("unregistering", engine.rank.unregister(0)).await.unwrap();
    assert_eq!(node.count("data_regions").await, 0);
    assert_eq!(
        code(engine.rank.unregister(0).await.unwrap_err()),
        Code::RegionUnknown
    );
    let again = engine
        .rank
        .register(0, engine.memory.region().unwrap())
        .await
        .unwrap();
    assert!(again.generation > 0);
    assert_eq!(
        code(
            engine
                .rank
                .register(0, engine.memory.region().unwrap())
                .await
                .unwrap_err()
        ),
        Code::RegionRegistered
    );
}

#[tokio::test]
async fn an_engine_rank_attaches_once() {
    let node = Node::start(&[]);
    let engine = Engine::attach(node.socket(), "e").await;
    let client = Client::connect(node.socket()).await.unwrap();
    let error = client.attach(envelope("e"), 0, None).await.unwrap_err();
    assert_eq!(code(error), Code::RankAttached);
    drop(engine);
    node.settles("ranks", 0).await;
    Engine::attach(node.socket(), "e").await;
}

#[tokio::test]
async fn ranks_that_disagree_are_all_refused_and_may_attach_again_when_it_is_mended() {
    let node = Node::start(&[]);
    let engine = Engine::attach_rank(node.socket(), split("e"), 0, None).await;
    let publication = engine
        .rank
        .publish(engine.publish_of("t", &[1], 4))
        .await
        .unwrap();
    let mut notices = engine.rank.notices();
    let mut other = split("e");
    other.identity.model = "another".into();
    let client = Client::connect(node.socket()).await.unwrap();
    let error = client.attach(other, 1, None).await.unwrap_err();
    assert!(error.to_string().contains("identity.model"), "{error}");
    assert_eq!(code(error), Code::RanksDisagree);
    let detached = async {
        loop {
            if let Some(Notice::Event(Event::Detached { cause })) = notices.next().await {
                return cause;
            }
        }
    };
    assert_eq!(soon("the detachment", detached).await.code, Code::RanksDisagree);
    let failed = soon("the publish's end", publication.ended()).await.unwrap_err();
    assert_eq!(failed.cause.code, Code::RanksDisagree);
    let refused = engine
        .rank
        .publish(engine.publish_of("t2", &[1], 4))
        .await
        .unwrap_err();
    assert_eq!(code(refused), Code::NotAttached);
    node.settles("data_regions", 0).await;

    soon("attaching again", engine.rank.reattach()).await.unwrap();
    engine.rank.ready().await.unwrap();
    engine
        .rank
        .publish(engine.publish_of("t3", &[1], 4))
        .await
        .unwrap();
}

#[tokio::test]
async fn calls_before_attach_are_refused() {
    let node = Node::start(&[]);
    let client = Client::connect(node.socket()).await.unwrap();
    // A rank number that the envelope does not have.
    let error = client.attach(envelope("e"), 5, None).await.unwrap_err();
    assert_eq!(code(error), Code::RankUnknown);
    node.settles("ranks", 0).await;
}

#[tokio::test]
async fn a_client_waits_for_a_daemon_that_is_not_up_yet() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kvferryd.sock");
    let error = Client::connect_within(&socket, Duration::ZERO).await.unwrap_err();
    assert!(matches!(error, ClientError::DaemonAway { .. }) && error.can_retry());
    let connecting = tokio::spawn({
        let socket = socket.clone();
        async move { Client::connect(socket).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let _daemon = Program::start(&directory.path().join("kvferryd.sock"), &[]);
    let client = soon("connecting", connecting).await.unwrap().unwrap();
    soon("the status", client.status()).await.unwrap();
}

#[tokio::test]
async fn memory_of_the_process_is_accepted() {
    let node = Node::start(&[]);
    let client = Client::connect(node.socket()).await.unwrap();
    let rank = client.attach(envelope("e"), 0, None).await.unwrap();
    let memory = vec![0u8; usize::try_from(MEMORY).unwrap()];
    let region = RegionMemory::Process {
        address: memory.as_ptr().addr() as u64,
        len: memory.len() as u64,
    };
    let registered = soon("registering", rank.register(0, region)).await.unwrap();
    assert!(!registered.paths.is_empty());
    rank.unregister(0).await.unwrap();
    let memfd = SealedMemory::create("x", 4096).unwrap();
    assert!(memfd.as_fd().try_clone_to_owned().is_ok());
}
