//! Clients that do what no client should: each is told why, and costs the others nothing.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kvferry_control::{
    Answer, Call, Fault, FrameReader, FrameWriter, MAX_FRAME, Memory, Request, Response, VERSIONS,
};
use kvferry_handshake::{Code, Versions, decode, encode, frame};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::rig::{Engine, MEMORY, Node, PATIENCE, envelope, soon};

/// A client that says what it likes.
struct Raw {
    stream: UnixStream,
    reader: FrameReader,
}

impl Raw {
    fn connect(socket: &Path) -> Raw {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Raw {
            stream,
            reader: FrameReader::new(MAX_FRAME),
        }
    }

    fn greeted(socket: &Path) -> Raw {
        let mut raw = Raw::connect(socket);
        raw.say(&Request::Hello(VERSIONS));
        assert!(matches!(raw.hear(), Some(Response::Hello(Ok(_)))));
        raw
    }

    fn attached(socket: &Path, engine: &str) -> Raw {
        let mut raw = Raw::greeted(socket);
        let envelope = Box::new(envelope(engine));
        raw.call(Call::Attach {
            envelope,
            rank: 0,
            home: None,
        })
        .unwrap();
        raw
    }

    fn say(&mut self, request: &Request) {
        let mut writer = FrameWriter::new();
        writer.push(encode(request).unwrap(), None).unwrap();
        writer.write(&self.stream).unwrap();
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    fn hear(&mut self) -> Option<Response> {
        let frame = self.reader.read(&self.stream).unwrap().unwrap()?;
        Some(decode(&frame.payload).unwrap())
    }

    /// The last word, and that it is the last.
    fn parting(&mut self) -> Fault {
        let Some(Response::Hello(Err(fault))) = self.hear() else {
            panic!("no last word");
        };
        assert!(self.hear().is_none(), "not closed");
        fault
    }

    fn answer(&mut self) -> Result<Answer, Fault> {
        match self.hear() {
            Some(Response::Answer { answer, .. }) => answer,
            other => panic!("{other:?}"),
        }
    }

    fn call(&mut self, call: Call) -> Result<Answer, Fault> {
        self.say(&Request::Call { number: 1, call });
        self.answer()
    }

    fn call_with_fds(&mut self, call: Call, fds: &[OwnedFd]) -> Result<Answer, Fault> {
        let bytes = frame(&encode(&Request::Call { number: 1, call }).unwrap()).unwrap();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let sent = rustix::net::sendmsg(
            &self.stream,
            &[std::io::IoSlice::new(&bytes)],
            &mut control,
            SendFlags::empty(),
        );
        assert_eq!(sent.unwrap(), bytes.len());
        self.answer()
    }
}

async fn blocking(test: impl FnOnce() + Send + 'static) {
    soon("the client's end", tokio::task::spawn_blocking(test))
        .await
        .unwrap();
}

/// An engine that behaves is served as if nothing were.
async fn others_are_served(node: &Node) {
    let engine = Engine::attach(node.socket(), "other").await;
    engine.rank.status().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_common_version_is_refused_by_name() {
    let node = Node::start(&[]);
    let socket = node.socket();
    blocking(move || {
        let mut raw = Raw::connect(&socket);
        raw.say(&Request::Hello(Versions {
            lowest: 700,
            highest: 900,
        }));
        let fault = raw.parting();
        assert_eq!(fault.code, Code::ProtocolVersion);
        assert!(fault.message.contains("700 to 900"), "{fault}");
        // A newer client that speaks our version, too.
        let mut raw = Raw::connect(&socket);
        raw.say(&Request::Hello(Versions {
            lowest: 1,
            highest: 900,
        }));
        assert!(
            matches!(raw.hear(), Some(Response::Hello(Ok(welcome))) if welcome.version == VERSIONS.highest)
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_too_long_truncated_or_mutated_end_their_connection_only() {
    let node = Node::start(&[]);
    let socket = node.socket();
    blocking(move || {
        let mut long_hello = Raw::connect(&socket);
        long_hello.bytes(&65u32.to_le_bytes());
        assert_eq!(long_hello.parting().code, Code::FrameTooLong);

        let mut long_attach = Raw::greeted(&socket);
        long_attach.bytes(&(17u32 << 20).to_le_bytes());
        assert_eq!(long_attach.parting().code, Code::FrameTooLong);

        let mut call_first = Raw::connect(&socket);
        call_first.say(&Request::Call {
            number: 1,
            call: Call::Status,
        });
        assert_eq!(call_first.parting().code, Code::ProtocolViolation);

        let mut hello_twice = Raw::greeted(&socket);
        hello_twice.say(&Request::Hello(VERSIONS));
        assert_eq!(hello_twice.parting().code, Code::ProtocolViolation);

        let mut left_over = Raw::greeted(&socket);
        let mut payload = encode(&Request::Call {
            number: 1,
            call: Call::Status,
        })
        .unwrap();
        payload.push(0);
        left_over.bytes(&frame(&payload).unwrap());
        assert_eq!(left_over.parting().code, Code::FrameMalformed);

        // Every truncation, and each byte changed, of an attach.
        let attach = Request::Call {
            number: 1,
            call: Call::Attach {
                envelope: Box::new(envelope("mutant")),
                rank: 0,
                home: None,
            },
        };
        let attach = encode(&attach).unwrap();
        for at in (0..attach.len()).step_by(7) {
            let mut truncated = Raw::greeted(&socket);
            truncated.bytes(&frame(&attach[..at]).unwrap());
            assert_eq!(truncated.parting().code, Code::FrameMalformed, "cut at {at}");
            let mut mutant = attach.clone();
            mutant[at] ^= 0x81;
            let mut mutated = Raw::greeted(&socket);
            mutated.bytes(&frame(&mutant).unwrap());
            // Whatever it has become, it is answered or refused.
            match mutated.hear() {
                Some(Response::Answer { .. } | Response::Hello(Err(_))) => {}
                other => panic!("byte {at}: {other:?}"),
            }
        }
        // One that ends inside a frame.
        let mut cut = Raw::greeted(&socket);
        cut.bytes(&[200, 0, 0, 0, 1, 2, 3]);
        drop(cut);
    })
    .await;
    others_are_served(&node).await;
    node.settles("connections", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fds_that_do_not_belong_are_closed_and_named() {
    let node = Node::start(&[]);
    let socket = node.socket();
    let register = |memory| Call::Register { region: 0, memory };
    let memfd = Memory::Memfd {
        offset: 0,
        len: MEMORY,
    };
    let process = Memory::Process {
        address: 4096,
        len: MEMORY,
    };
    blocking(move || {
        // The pipe's reading end sees its end once the daemon has closed every copy of the writing end.
        let pipe = |count: usize| {
            let (reading, writing) = std::io::pipe().unwrap();
            let fds: Vec<OwnedFd> = (0..count).map(|_| writing.try_clone().unwrap().into()).collect();
            (reading, fds)
        };
        let mut raw = Raw::attached(&socket, "abuser");
        let no_fd = raw.call(register(memfd)).unwrap_err();
        assert_eq!(no_fd.code, Code::RegionKind);
        assert!(no_fd.message.contains("no fd came with region 0"), "{no_fd}");
        for (call, count, said) in [
            (register(memfd), 1, "memfd"),
            (register(memfd), 2, "several fds came with region 0"),
            (register(memfd), 8, "several fds came with region 0"),
            (register(process), 1, "an fd came with region 0"),
            (Call::Status, 1, "fds came with a call that takes none"),
            (
                Call::Unregister { region: 0 },
                3,
                "fds came with a call that takes none",
            ),
        ] {
            let (mut reading, fds) = pipe(count);
            let fault = raw.call_with_fds(call.clone(), &fds).unwrap_err();
            assert_eq!(fault.code, Code::RegionKind, "{call:?}");
            assert!(fault.message.contains(said), "{fault}");
            drop(fds);
            assert_eq!(reading.read(&mut [0]).unwrap(), 0, "{call:?}");
        }
        // The connection lives on.
        raw.call(Call::Status).unwrap();
        let mut early = Raw::greeted(&socket);
        let (_, fds) = pipe(1);
        assert_eq!(
            early.call_with_fds(register(memfd), &fds).unwrap_err().code,
            Code::NotAttached
        );
    })
    .await;
    node.settles("data_regions", 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_do_not_wait_for_answers_take_effect_in_order() {
    let node = Node::start(&[]);
    let socket = node.socket();
    blocking(move || {
        let mut raw = Raw::greeted(&socket);
        let envelope = Box::new(envelope("hasty"));
        raw.say(&Request::Call {
            number: 1,
            call: Call::Attach {
                envelope,
                rank: 0,
                home: None,
            },
        });
        for number in 2..5 {
            raw.say(&Request::Call {
                number,
                call: Call::Unregister { region: 0 },
            });
        }
        let memory = Memory::Memfd {
            offset: 0,
            len: MEMORY,
        };
        raw.say(&Request::Call {
            number: 5,
            call: Call::Register { region: 0, memory },
        });
        // Answers come in any order; effects do not: the last one is refused since no fd came along, not since
        // it is not attached.
        let mut answers: Vec<(u64, Option<Code>)> = (1..=5)
            .map(|_| match raw.hear() {
                Some(Response::Answer { number, answer }) => (number, answer.err().map(|fault| fault.code)),
                other => panic!("{other:?}"),
            })
            .collect();
        answers.sort_by_key(|(number, _)| *number);
        let unknown = Some(Code::RegionUnknown);
        let expected = [None, unknown, unknown, unknown, Some(Code::RegionKind)];
        assert!(answers.iter().map(|(_, code)| *code).eq(expected), "{answers:?}");
    })
    .await;
    node.settles("connections", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_idle_connections_hurt_nobody() {
    let node = Node::start(&["--limits-connections-per-user=300"]);
    let engine = Engine::attach(node.socket(), "early").await;
    let idle: Vec<UnixStream> = (0..1_000)
        .map(|_| UnixStream::connect(node.socket()).unwrap())
        .collect();
    // They give way, oldest first, to each other and to whoever comes; the attached one stays.
    others_are_served(&node).await;
    engine.rank.status().await.unwrap();
    assert!(node.count("connections").await <= 300);
    drop(idle);
    node.settles("connections", 2).await;
    drop(engine);
    node.settles("connections", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_never_greets_is_closed() {
    let node = Node::start(&[]);
    let socket = node.socket();
    blocking(move || {
        let fault = Raw::connect(&socket).parting();
        assert_eq!(fault.code, Code::ProtocolViolation);
        assert!(
            fault.message.contains("no Hello came within 5 seconds"),
            "{fault}"
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_never_reads_is_disconnected_and_hurts_nobody() {
    let node = Node::start(&["--limits-engine-queue-bytes=65536"]);
    let engine = Engine::attach(node.socket(), "well-behaved").await;
    for slowly in [false, true] {
        let mut raw = Raw::attached(&node.socket(), "deaf");
        raw.stream.set_nonblocking(true).unwrap();
        let call = encode(&Request::Call {
            number: 1,
            call: Call::Status,
        })
        .unwrap();
        let call = frame(&call).unwrap();
        // Asks without end and never reads an answer.
        let asking = async {
            loop {
                match raw.stream.write(&call) {
                    // Slowly, its socket is full before anything waits in the daemon; quickly, the other way round.
                    Ok(_) if slowly => tokio::time::sleep(Duration::from_millis(1)).await,
                    Ok(_) => tokio::task::yield_now().await,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    Err(_) => return,
                }
            }
        };
        soon("its disconnection", asking).await;
    }
    soon("another's status", engine.rank.status()).await.unwrap();
    node.settles("connections", 2).await;
    node.settles("ranks", 1).await;
}
