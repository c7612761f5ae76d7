//! Publish and fetch meet, in either order.

use kvferry_control::Event;
use kvferry_handshake::{Ready, Role};

use crate::engines::{id, tokens};
use crate::geometry::envelope;
use crate::sim::Cluster;

fn pair(cluster: &mut Cluster, prefill: &[usize], decode: &[usize]) -> (usize, usize) {
    let tp = |nodes: &[usize]| u32::try_from(nodes.len()).unwrap();
    let p = cluster.engine(envelope("p", Role::Prefill, tp(prefill), 0), prefill);
    let d = cluster.engine(envelope("d", Role::Decode, tp(decode), 0), decode);
    cluster.start(p);
    cluster.start(d);
    (p, d)
}

fn delivered(cluster: &Cluster, engine: usize) -> usize {
    let ranks = cluster.engines[engine]
        .ranks
        .iter()
        .map(|rank| &cluster.ranks[*rank]);
    let delivered = |event: &&Event| matches!(event, Event::Delivered { .. });
    ranks
        .filter(|rank| rank.events.iter().filter(delivered).count() == 1)
        .count()
}

fn carry(prefill: &[usize], decode: &[usize], fetch_first: bool) {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, prefill, decode);
    let transfer = id("a", 0);
    let publish = |cluster: &mut Cluster| {
        for rank in cluster.engines[p].ranks.clone() {
            cluster.publish(rank, &transfer, 21, Ready::complete(21), 1, None);
        }
        cluster.run_for(100_000);
    };
    let fetch = |cluster: &mut Cluster| {
        for rank in cluster.engines[d].ranks.clone() {
            cluster.fetch(rank, p, &transfer, tokens(3, 21), 21);
        }
        cluster.run_for(100_000);
    };
    if fetch_first {
        fetch(&mut cluster);
        assert_eq!(delivered(&cluster, d), 0);
        publish(&mut cluster);
    } else {
        publish(&mut cluster);
        fetch(&mut cluster);
    }
    assert_eq!(delivered(&cluster, d), decode.len());
    assert_eq!(delivered(&cluster, p), prefill.len());
    assert_eq!(cluster.ledger.delivered_bytes, 18 * 2 * 2 * 4 * 4);
}

#[test]
fn on_one_daemon_and_on_several_in_either_order() {
    for fetch_first in [false, true] {
        carry(&[0], &[0], fetch_first);
        carry(&[0], &[1], fetch_first);
        carry(&[0, 0, 0, 0], &[1, 1], fetch_first);
        carry(&[0, 0], &[0, 0, 0, 0], fetch_first);
        carry(&[0, 1], &[0, 2, 2, 1], fetch_first);
        carry(&[0, 1, 2, 0], &[2, 1], fetch_first);
    }
}
