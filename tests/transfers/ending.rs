//! Transfers that end before their time: aborted, unregistered, with their engine, with their daemon.

use kvferry_client::{ClientError, Progress, Publication};
use kvferry_handshake::{Code, PageLists, Role};
use kvferry_tests::engine::{Carry, Engine, Fetched, fetch_request, named, of_tokens, tokens};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::Options;
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::{PATIENCE, within};

use crate::{A_WHILE, Setting, all_ended, cause, envelope, publish};

/// A transfer of 900 tokens of which 700 are published: it moves, and cannot end.
struct UnderWay {
    source: Vec<PageLists>,
    publications: Vec<Publication>,
    fetched: Fetched,
}

impl UnderWay {
    async fn begin(setting: &Setting, decode: &Engine, what: &str) -> UnderWay {
        let stamp = Stamp::of(what);
        let source = setting.prefill.draw(900, false);
        let mut publications = Vec::new();
        for (rank, lists) in source.iter().enumerate() {
            publications.push(publish(&setting.prefill, rank, &stamp, lists, of_tokens(700), None).await);
        }
        let fetched = setting.fetch(decode, &stamp, 900).await;
        within(PATIENCE, what, publications[0].moved_on(&Progress::default())).await;
        UnderWay {
            source,
            publications,
            fetched,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn either_side_ends_a_transfer_for_both() {
    let setting = Setting::new(Options::default()).await;
    for (name, decode) in setting.decodes() {
        for by_decode in [true, false] {
            let what = format!("aborted by the decode side: {by_decode}, {name}");
            let UnderWay {
                source,
                publications,
                fetched,
            } = UnderWay::begin(&setting, decode, &what).await;
            let rank = if by_decode {
                &decode.ranks[0]
            } else {
                &setting.prefill.ranks[1]
            };
            rank.rank.abort(&Stamp::of(&what).transfer()).await.unwrap();
            let ends = fetched.ended(PATIENCE).await;
            all_ended(&ends, Code::Aborted, &what);
            // From here on nothing lands.
            for (rank, lists) in decode.ranks.iter().zip(&fetched.lists) {
                rank.pool().poison(lists);
            }
            for publication in &publications {
                let end = within(PATIENCE, &what, publication.ended()).await;
                all_ended(&[end], Code::Aborted, &what);
            }
            tokio::time::sleep(A_WHILE).await;
            for (rank, lists) in decode.ranks.iter().zip(&fetched.lists) {
                rank.pool().check(lists, &format!("{what}: after the end"));
            }
            decode.give_back(&fetched.lists);
            setting.prefill.give_back(&source);
        }
    }
    setting.goes_on("aborted").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregister_ends_the_transfers_that_use_the_region() {
    let setting = Setting::new(Options::default()).await;
    for (name, decode) in setting.decodes() {
        for at_decode in [true, false] {
            let what = format!("unregistered at the decode side: {at_decode}, {name}");
            let UnderWay {
                source,
                publications,
                fetched,
            } = UnderWay::begin(&setting, decode, &what).await;
            let rank = if at_decode {
                &decode.ranks[0]
            } else {
                &setting.prefill.ranks[0]
            };
            within(PATIENCE, &what, rank.rank.unregister(0)).await.unwrap();
            if at_decode {
                // The memory is the engine's again.
                decode.ranks[0].pool().poison(&fetched.lists[0]);
            }
            all_ended(&fetched.ended(PATIENCE).await, Code::Unregistered, &what);
            for publication in &publications {
                let end = within(PATIENCE, &what, publication.ended()).await;
                all_ended(&[end], Code::Unregistered, &what);
            }
            tokio::time::sleep(A_WHILE).await;
            if at_decode {
                decode.ranks[0].pool().check(&fetched.lists[0], &what);
            } else {
                decode.ranks[0].pool().poison(&fetched.lists[0]);
            }
            let again = {
                let pool = rank.pool();
                let (_, memory) = pool.regions().next().unwrap();
                memory.region()
            };
            within(PATIENCE, &what, rank.rank.register(0, again))
                .await
                .unwrap();
            decode.give_back(&fetched.lists);
            setting.prefill.give_back(&source);
        }
    }
    setting.goes_on("unregistered").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_ends_takes_its_transfers_with_it() {
    let setting = Setting::new(Options::default()).await;
    let before = [
        setting.a.footprint().await.memfd_maps,
        setting.b.footprint().await.memfd_maps,
    ];
    for node in [&setting.a, &setting.b] {
        // A decode engine ends while it fetches.
        let doomed = Engine::attach(named(&envelope(1), "doomed", Role::Decode), &[node], Kind::Memfd).await;
        let UnderWay {
            source,
            publications,
            fetched,
        } = UnderWay::begin(&setting, &doomed, &format!("to the doomed on {}", node.address())).await;
        drop((fetched, doomed));
        for publication in &publications {
            let end = within(PATIENCE, "the end", publication.ended()).await;
            all_ended(&[end], Code::EngineGone, "the doomed decode engine");
        }
        setting.prefill.give_back(&source);

        // A prefill engine ends while it is fetched from, and its successor of the same name is found.
        let doomed = Engine::attach(named(&envelope(1), "doomed", Role::Prefill), &[node], Kind::Memfd).await;
        let stamp = Stamp::of(&format!("from the doomed on {}", node.address()));
        let lists = doomed.draw(900, false);
        let publication = publish(&doomed, 0, &stamp, &lists[0], of_tokens(700), None).await;
        let fetched = setting
            .far
            .fetch(&doomed.address(), &stamp, tokens(0, 900), 900, false)
            .await;
        within(PATIENCE, "the match", publication.moved_on(&Progress::default())).await;
        drop((publication, doomed));
        let ends = fetched.ended(PATIENCE).await;
        all_ended(&ends, Code::EngineGone, "the doomed prefill engine");
        setting.far.settle_fetch(&fetched, &ends, "gone");
        let successor =
            Engine::attach(named(&envelope(1), "doomed", Role::Prefill), &[node], Kind::Memfd).await;
        let carry = Carry {
            transfer: &format!("from the successor on {}", node.address()),
            tokens: 100,
            held: 0,
            sparse: false,
            fetch_first: false,
            path: None,
        };
        carry.run(&successor, &setting.far).await;
        drop(successor);
    }
    setting.goes_on("ended engines").await;
    for (node, maps) in [&setting.a, &setting.b].into_iter().zip(before) {
        let probe = || async {
            let now = node.footprint().await.memfd_maps;
            if now == maps {
                Ok(())
            } else {
                Err(format!("{now} mappings"))
            }
        };
        kvferry_tests::wait::until(PATIENCE, format!("{maps} mappings again"), probe).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_is_killed_comes_back_to_its_engines() {
    let mut setting = Setting::new(Options::default().set("deadline_ms", 10_000)).await;
    for (turn, prefill_side) in [true, false].into_iter().enumerate() {
        let what = format!("the prefill side's daemon: {prefill_side}");
        let UnderWay {
            source,
            publications,
            fetched,
        } = UnderWay::begin(&setting, &setting.far, &what).await;
        let node = if prefill_side {
            &mut setting.a
        } else {
            &mut setting.b
        };
        node.kill();
        let ends = fetched.ended(PATIENCE).await;
        assert!(ends.iter().all(Result::is_err), "{what}: {ends:?}");
        setting.far.settle_fetch(&fetched, &ends, &what);
        for publication in &publications {
            let end = within(PATIENCE, &what, publication.ended()).await;
            assert!(end.is_err(), "{what}: {end:?}");
            if prefill_side {
                assert_eq!(cause(&end).code, Code::DaemonRestarted, "{what}");
            }
        }
        if !prefill_side {
            assert_eq!(cause(&ends[0]).code, Code::DaemonRestarted, "{what}");
        }
        let node = if prefill_side {
            &mut setting.a
        } else {
            &mut setting.b
        };
        node.restart().await;
        setting.prefill.give_back(&source);
        for engine in [&setting.prefill, &setting.far, &setting.near] {
            for rank in &engine.ranks {
                within(PATIENCE, "attached again", rank.rank.ready())
                    .await
                    .unwrap();
            }
        }
        setting.goes_on(&format!("{what} {turn}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_from_nowhere_says_why() {
    let setting = Setting::new(Options::default().set("deadline_ms", 3_000)).await;
    let nobody = format!("kvferry://127.0.0.1:{}/prefill", kvferry_tests::node::free_port());
    let unknown = format!("kvferry://{}/nobody", setting.a.address());
    let itself = format!("kvferry://{}/nobody", setting.b.address());
    let no_engine = format!("kvferry://{}", setting.a.address());
    for (source, code, named) in [
        (nobody.clone(), Code::PeerUnreachable, host(&nobody)),
        (unknown, Code::EngineUnknown, "nobody"),
        (itself, Code::EngineUnknown, "nobody"),
        (
            "http://127.0.0.1:1/x".to_owned(),
            Code::AddressInvalid,
            "http://127.0.0.1:1/x",
        ),
        (no_engine.clone(), Code::AddressInvalid, &no_engine),
        (
            "kvferry://127.0.0.1:0/x".to_owned(),
            Code::AddressInvalid,
            "127.0.0.1:0",
        ),
    ] {
        let lists = setting.far.draw(50, false);
        let request = fetch_request(&source, &Stamp::of(&source), &lists[0], tokens(0, 50), 50);
        let fault = match setting.far.ranks[0].fetch(request).await {
            Ok(fetching) => {
                within(PATIENCE, &source, fetching.ended())
                    .await
                    .unwrap_err()
                    .cause
            }
            Err(ClientError::Refused(fault)) => fault,
            Err(other) => panic!("{source}: {other}"),
        };
        assert_eq!(fault.code, code, "{source}: {fault}");
        assert!(fault.message.contains(named), "{source}: {fault}");
        setting.far.ranks[0].pool().check(&lists[0], &source);
        setting.far.give_back(&lists);
    }
    setting.goes_on("nowhere").await;
}

/// Host and port of an engine's address.
fn host(source: &str) -> &str {
    let rest = source.strip_prefix("kvferry://").unwrap();
    rest.split('/').next().unwrap()
}
