//! Pages that two open fetches of a rank would write.

use kvferry_control::{Call, Fault, Fetch, TransferId};
use kvferry_handshake::{Code, PageLists};

use crate::engines::{Asked, id, tokens};
use crate::ledger::Side;
use crate::scene::{MOMENT, pair};
use crate::sim::Cluster;

/// One prefill and one decode rank on two nodes, and a fetch of `a` under way that stalls: its pages.
fn under_way() -> (Cluster, usize, usize, Vec<u32>) {
    let mut cluster = Cluster::new(1, 2);
    cluster.stall();
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let rank = cluster.ranks_of(d)[0];
    for attempt in 0..2 {
        cluster.publish_all(p, &id("a", attempt), 9);
        cluster.fetch_all(d, p, &id("a", attempt), 9);
        cluster.run_for(MOMENT);
        if attempt == 0 {
            // From here on, the link is there.
            cluster.abort(rank, &id("a", 0));
            cluster.run_for(MOMENT);
        }
    }
    let tag = (Side::Fetch, id("a", 1));
    let pages = cluster.ranks[rank].held[&tag].groups[0].clone();
    (cluster, p, rank, pages)
}

fn fetch(
    cluster: &mut Cluster,
    p: usize,
    rank: usize,
    transfer: &TransferId,
    pages: &[u32],
    from: u64,
) -> Result<(), Fault> {
    let fetch = Fetch {
        source: cluster.source(p),
        transfer: transfer.clone(),
        pages: PageLists {
            groups: vec![pages.to_vec()],
        },
        generations: cluster.generations(rank),
        tokens: tokens(from, 4 * pages.len() as u64),
        least: from,
    };
    let asked = Asked::Transfer((Side::Fetch, transfer.clone()));
    let call = cluster.rank_call(rank, asked, Call::Fetch(fetch));
    cluster.answer_to(rank, call).clone().map(|_| ())
}

#[test]
fn a_page_that_an_open_fetch_writes_is_refused_by_name_until_that_has_ended() {
    let (mut cluster, p, rank, pages) = under_way();
    assert_eq!(cluster.counts(1)["pages_written"], 3);
    let free: Vec<u32> = cluster.ranks[rank].free.clone();
    let both = [free[0], pages[2]];
    let refused = fetch(&mut cluster, p, rank, &id("b", 7), &both, 0).unwrap_err();
    assert_eq!(refused.code, Code::PageInUse);
    let page = format!("page {} of group", pages[2]);
    for named in ["transfer b attempt 7", "transfer a attempt 1", page.as_str()] {
        assert!(refused.message.contains(named), "{named}: {}", refused.message);
    }
    assert_eq!(cluster.counts(1)["pages_written"], 3, "a refusal holds nothing");
    // Pages of tokens that are held already are only read: prompts share them.
    fetch(&mut cluster, p, rank, &id("c", 0), &[pages[0], free[0]], 4).unwrap();
    assert_eq!(cluster.counts(1)["pages_written"], 4);
    cluster.abort(rank, &id("a", 1));
    cluster.run_until(MOMENT, |cluster| cluster.end_of(rank, &id("a", 1)).is_some());
    fetch(&mut cluster, p, rank, &id("b", 7), &[free[1], pages[2]], 0).unwrap();
    cluster.abort(rank, &id("b", 7));
    cluster.abort(rank, &id("c", 0));
    cluster.run_for(MOMENT);
    assert_eq!(cluster.counts(1)["pages_written"], 0);
}

#[test]
fn a_page_stays_held_until_the_fetch_is_fenced_and_so_does_a_higher_attempts() {
    let (mut cluster, p, rank, pages) = under_way();
    let job = cluster.nodes[1].data.open_jobs();
    assert_eq!(job.len(), 1);
    // The same pages again: it waits for the lower attempt's fence, and nobody else gets them.
    fetch(&mut cluster, p, rank, &id("a", 2), &pages, 0).unwrap();
    assert_eq!(cluster.nodes[1].data.open_jobs(), job, "it must not write yet");
    cluster.abort(rank, &id("a", 2));
    assert_eq!(
        cluster.end_of(rank, &id("a", 2)),
        None,
        "the lower attempt may still write"
    );
    let refused = fetch(&mut cluster, p, rank, &id("b", 0), &pages, 0).unwrap_err();
    assert_eq!(refused.code, Code::PageInUse);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.code_of(rank, &id("a", 1)), Some(Code::Superseded));
    assert_eq!(cluster.code_of(rank, &id("a", 2)), Some(Code::Aborted));
    assert_eq!(cluster.counts(1)["pages_written"], 0);
    fetch(&mut cluster, p, rank, &id("b", 0), &pages, 0).unwrap();
}

#[test]
fn a_higher_attempt_goes_on_when_the_lower_one_is_fenced() {
    let (mut cluster, p, rank, pages) = under_way();
    fetch(&mut cluster, p, rank, &id("a", 2), &pages, 0).unwrap();
    let began = cluster.run_until(MOMENT, |cluster| {
        cluster.counts(1)["jobs"] == 1 && cluster.end_of(rank, &id("a", 1)).is_some()
    });
    assert!(began, "the higher attempt opens its job");
    assert_eq!(cluster.counts(1)["fetches"], 1);
}
