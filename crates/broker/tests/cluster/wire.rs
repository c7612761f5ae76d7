//! The wire form stays what it is: golden frames, bounds, and bytes that are no message.

use std::path::PathBuf;

use kvferry_broker::{
    Announce, Arose, Body, Cause, EngineId, FetchState, LinkAnswer, Offer, PartState, PeerMessage, Place,
    Seat, SiblingFailure, Standing, Stated,
};
use kvferry_control::{Fault, Side};
use kvferry_handshake::{
    ABSENT, Code, Mismatch, Outcome, PageLists, Policy, Ready, Role, TokenRange, Verdict,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::engines::id;
use crate::geometry::envelope;

fn engine(name: &str) -> EngineId {
    EngineId {
        home: "node0:7400".to_owned(),
        home_incarnation: 0x0102_0304_0506_0708,
        name: name.to_owned(),
        life: 9,
    }
}

fn cause() -> Fault {
    Fault {
        code: Code::Deadline,
        message: "nothing went forward for 30 s".to_owned(),
        mismatches: vec![mismatch()],
    }
}

/// With where it arose.
fn failure_cause() -> Cause {
    Cause {
        code: Code::SiblingFailed,
        first: cause(),
        arose: Some(Box::new(Arose {
            at: Place {
                side: Side::Publish,
                rank: 3,
                engine: "p".to_owned(),
                daemon: "node0:7400".to_owned(),
            },
            standing: Some(Standing {
                phase: "final, 17 tokens ready;".to_owned(),
                peer: "engine d at node1:7400: moving to its rank 0 at node1:7400 (5 of 9 bytes)".to_owned(),
                trouble: "0.2 s before, with node1:7400: a lane broke".to_owned(),
                bytes: 5,
                total: Some(9),
            }),
        })),
    }
}

fn mismatch() -> Mismatch {
    Mismatch {
        code: Code::PageSize,
        field: "page_group.main.page_size".to_owned(),
        prefill: "64".to_owned(),
        decode: "1".to_owned(),
        why: "why".to_owned(),
        fix: "fix".to_owned(),
    }
}

fn verdict() -> Box<Verdict> {
    Box::new(Verdict {
        outcome: Outcome::Refused,
        policy: Policy::Bridge,
        mismatches: vec![mismatch()],
        bridged: vec![],
        warnings: vec![mismatch()],
    })
}

fn failure(side: Side) -> SiblingFailure {
    SiblingFailure {
        engine: engine("p"),
        side,
        transfer: id("request-1", 2),
        rank: 3,
        cause: failure_cause(),
    }
}

/// One of each kind, and of each state.
pub(crate) fn samples() -> Vec<(&'static str, Body)> {
    let small = || Stated::new(envelope("d", Role::Decode, 1, 5));
    let part = |state| Body::PartState {
        fetch: 7,
        rank: 3,
        serial: 11,
        moving: true,
        state,
    };
    let fetch = |state| Body::FetchState { fetch: 7, state };
    vec![
        (
            "join",
            Body::Join {
                envelope: small(),
                rank: 1,
                life: 2,
            },
        ),
        (
            "joined",
            Body::Joined {
                engine: engine("p"),
                rank: 1,
                life: 2,
            },
        ),
        (
            "join_refused",
            Body::JoinRefused {
                life: 2,
                cause: cause(),
            },
        ),
        (
            "keep",
            Body::Keep {
                engine: engine("p"),
                rank: 1,
                life: 2,
            },
        ),
        (
            "seat_lost",
            Body::SeatLost {
                engine: engine("p"),
                life: 2,
            },
        ),
        (
            "leave",
            Body::Leave {
                name: "p".to_owned(),
                rank: 1,
                life: 2,
            },
        ),
        (
            "detach",
            Body::Detach {
                engine: engine("p"),
                cause: cause(),
            },
        ),
        ("failed", Body::Failed(failure(Side::Publish))),
        ("sibling_failed", Body::SiblingFailed(failure(Side::Fetch))),
        (
            "hint",
            Body::Hint {
                home: "node1:7400".to_owned(),
                name: "p".to_owned(),
                transfer: id("request-1", 2),
                by: engine("d"),
                declined: true,
            },
        ),
        (
            "expect",
            Body::Expect {
                name: "p".to_owned(),
                transfer: id("request-1", 2),
                by: engine("d"),
                declined: false,
            },
        ),
        (
            "expected",
            Body::Expected {
                engine: engine("p"),
                transfer: id("request-1", 2),
                by: engine("d"),
                declined: true,
            },
        ),
        (
            "link_open",
            Body::LinkOpen {
                name: "p".to_owned(),
                decode: engine("d"),
                policy: Policy::Strict,
                envelope: Some(small()),
                known: Some(engine("p")),
            },
        ),
        (
            "no_link",
            Body::NoLink {
                name: "p".to_owned(),
                decode: engine("d"),
                cause: cause(),
            },
        ),
        (
            "link_needs_envelope",
            Body::LinkNeedsEnvelope {
                name: "p".to_owned(),
                decode: engine("d"),
            },
        ),
        (
            "link_answer",
            Body::LinkAnswer(LinkAnswer {
                decode: engine("d"),
                engine: engine("p"),
                policy: Policy::Strict,
                envelope: None,
                verdict: verdict(),
                digest: Some([0xab; 32]),
                seats: vec![
                    None,
                    Some(Seat {
                        address: "node1:7400".to_owned(),
                        incarnation: 4,
                        life: 6,
                    }),
                ],
            }),
        ),
        (
            "link_offer",
            Body::LinkOffer {
                engine: engine("p"),
                decode: engine("d"),
                policy: Policy::Bridge,
                envelope: small(),
            },
        ),
        (
            "link_failed",
            Body::LinkFailed {
                engine: engine("p"),
                decode: engine("d"),
                verdict: verdict(),
            },
        ),
        (
            "announce",
            Body::Announce(Announce {
                fetch: 7,
                engine: engine("p"),
                decode: engine("d"),
                decode_rank: 1,
                transfer: id("request-1", 2),
                tokens: TokenRange { from: 16, to: 96 },
                least: 90,
                pages: std::sync::Arc::new(PageLists {
                    groups: vec![vec![5, ABSENT, 3], vec![]],
                }),
                digest: [0xcd; 32],
                offers: vec![
                    Offer {
                        rank: 0,
                        life: 6,
                        slot: Some(44),
                    },
                    Offer {
                        rank: 1,
                        life: 8,
                        slot: None,
                    },
                ],
            }),
        ),
        (
            "ask",
            Body::Ask {
                fetch: 7,
                ranks: vec![(0, 6), (1, 8)],
                serial: 11,
            },
        ),
        ("part_unknown", part(PartState::Unknown)),
        ("part_stale", part(PartState::Stale)),
        ("part_needs_link", part(PartState::NeedsLink)),
        ("part_waiting", part(PartState::Waiting)),
        (
            "part_ready",
            part(PartState::Ready(Ready {
                tokens: 32,
                front_tokens: 64,
                front_layers: 5,
                end: None,
            })),
        ),
        (
            "part_final",
            part(PartState::Final {
                end: 90,
                metadata: Some(vec![1, 2, 3]),
            }),
        ),
        ("part_failed", part(PartState::Failed(failure_cause()))),
        ("fetch_unknown", fetch(FetchState::Unknown)),
        (
            "fetch_open",
            fetch(FetchState::Open {
                landed: 5,
                moving: true,
            }),
        ),
        ("fetch_delivered", fetch(FetchState::Delivered)),
        ("fetch_failed", fetch(FetchState::Failed(failure_cause()))),
        ("fetch_withdrawn", fetch(FetchState::Withdrawn)),
        ("ask_fetch", Body::AskFetch { fetch: 7 }),
    ]
}

fn message(body: Body) -> PeerMessage {
    PeerMessage { to: 0x1122, body }
}

fn hex(bytes: &[u8]) -> String {
    let lines: Vec<String> = bytes
        .chunks(32)
        .map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect())
        .collect();
    lines.join("\n") + "\n"
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    digits
        .chunks(2)
        .map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap())
        .collect()
}

/// `KVFERRY_WRITE_GOLDEN=1` writes them; never change one of a release.
#[test]
fn golden_frames() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for (name, body) in samples() {
        let message = message(body);
        let bytes = message.to_bytes().unwrap();
        let path = folder.join(format!("{name}.hex"));
        if std::env::var_os("KVFERRY_WRITE_GOLDEN").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&path, hex(&bytes)).unwrap();
        }
        let golden = unhex(&std::fs::read_to_string(&path).unwrap());
        assert_eq!(bytes, golden, "{name} is encoded as before");
        assert_eq!(
            PeerMessage::from_bytes(&golden).unwrap(),
            message,
            "{name} is decoded as before"
        );
    }
}

#[test]
fn bytes_that_are_no_message_are_refused() {
    let mut rng = SmallRng::seed_from_u64(1);
    for (name, body) in samples() {
        let bytes = message(body).to_bytes().unwrap();
        for len in 0..bytes.len() {
            assert!(
                PeerMessage::from_bytes(&bytes[..len]).is_err(),
                "{name} cut to {len}"
            );
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(
            PeerMessage::from_bytes(&longer).is_err(),
            "{name} with a byte left over"
        );
        // Whatever a flipped byte makes of it, it is an answer and not a panic or a huge allocation.
        for _ in 0..2_000 {
            let mut bytes = bytes.clone();
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..bytes.len());
                bytes[at] = rng.random();
            }
            let _ = PeerMessage::from_bytes(&bytes);
        }
    }
}

#[test]
fn what_is_longer_than_any_honest_daemon_makes_it_is_refused() {
    let long = "x".repeat(5_000);
    let far = |mut id: EngineId| {
        id.home = long.clone();
        id
    };
    let named = |mut id: EngineId| {
        id.name = long.clone();
        id
    };
    let worded = || Fault::new(Code::Deadline, long.clone());
    let listed = || Fault {
        mismatches: vec![mismatch(); 300],
        ..cause()
    };
    let arisen = |change: fn(&mut Arose)| {
        let mut cause = failure_cause();
        change(cause.arose.as_mut().unwrap());
        cause
    };
    let announced = |announce: fn(&mut Announce)| {
        let Some((_, Body::Announce(mut it))) = samples().into_iter().find(|(name, _)| *name == "announce")
        else {
            panic!("a sample");
        };
        announce(&mut it);
        Body::Announce(it)
    };
    let answered = |change: fn(&mut LinkAnswer)| {
        let Some((_, Body::LinkAnswer(mut it))) =
            samples().into_iter().find(|(name, _)| *name == "link_answer")
        else {
            panic!("a sample");
        };
        change(&mut it);
        Body::LinkAnswer(it)
    };
    let hostile = [
        Body::Keep {
            engine: far(engine("p")),
            rank: 0,
            life: 0,
        },
        Body::Joined {
            engine: named(engine("p")),
            rank: 0,
            life: 0,
        },
        Body::JoinRefused {
            life: 0,
            cause: worded(),
        },
        Body::Detach {
            engine: engine("p"),
            cause: listed(),
        },
        Body::Leave {
            name: long.clone(),
            rank: 0,
            life: 0,
        },
        Body::Failed(SiblingFailure {
            transfer: id(&long, 0),
            ..failure(Side::Fetch)
        }),
        Body::SiblingFailed(SiblingFailure {
            cause: arisen(|arose| arose.at.engine = "x".repeat(5_000)),
            ..failure(Side::Fetch)
        }),
        Body::Failed(SiblingFailure {
            cause: arisen(|arose| arose.at.daemon = "x".repeat(5_000)),
            ..failure(Side::Fetch)
        }),
        Body::FetchState {
            fetch: 0,
            state: FetchState::Failed(arisen(|arose| {
                arose.standing.as_mut().unwrap().peer = "x".repeat(5_000);
            })),
        },
        Body::SiblingFailed(SiblingFailure {
            cause: worded().into(),
            ..failure(Side::Fetch)
        }),
        Body::Hint {
            home: long.clone(),
            name: "p".to_owned(),
            transfer: id("a", 0),
            by: engine("d"),
            declined: true,
        },
        Body::Hint {
            home: "node1:7400".to_owned(),
            name: "p".to_owned(),
            transfer: id("a", 0),
            by: far(engine("d")),
            declined: true,
        },
        Body::Expect {
            name: long.clone(),
            transfer: id("a", 0),
            by: engine("d"),
            declined: true,
        },
        Body::Expected {
            engine: engine("p"),
            transfer: id(&long, 0),
            by: engine("d"),
            declined: true,
        },
        Body::NoLink {
            name: "p".to_owned(),
            decode: named(engine("d")),
            cause: cause(),
        },
        Body::LinkNeedsEnvelope {
            name: long.clone(),
            decode: engine("d"),
        },
        Body::LinkFailed {
            engine: engine("p"),
            decode: far(engine("d")),
            verdict: verdict(),
        },
        Body::PartState {
            fetch: 0,
            rank: 0,
            serial: 0,
            moving: false,
            state: PartState::Final {
                end: 0,
                metadata: Some(vec![0; 70_000]),
            },
        },
        Body::PartState {
            fetch: 0,
            rank: 0,
            serial: 0,
            moving: false,
            state: PartState::Failed(worded().into()),
        },
        Body::FetchState {
            fetch: 0,
            state: FetchState::Failed(listed().into()),
        },
        Body::Ask {
            fetch: 0,
            ranks: vec![(0, 0); 2_000],
            serial: 0,
        },
        announced(|it| it.offers = vec![it.offers[0]; 2_000]),
        announced(|it| it.transfer.id = "x".repeat(300)),
        answered(|it| it.seats = vec![None; 2_000]),
        answered(|it| it.verdict.mismatches = vec![mismatch(); 20_000]),
        answered(|it| it.verdict.warnings[0].why = "x".repeat(5_000)),
        answered(|it| it.seats[1].as_mut().unwrap().address = "x".repeat(500)),
    ];
    for body in hostile {
        let message = message(body);
        assert!(message.check_bounds().is_err(), "{:.200}", format!("{message:?}"));
        assert!(PeerMessage::from_bytes(&message.to_bytes().unwrap()).is_err());
    }
}
