//! The table at the end of a burst.

use crate::burst::{Carried, Ledger};

/// Prints one line a transfer and one for the whole burst.
pub(crate) fn print(ledger: &Ledger) {
    println!(
        "  {:<10} {:>7} {:>12} {:>6} {:>8} {:>7} {:>22}",
        "transfer", "tokens", "bytes", "path", "moves", "GB/s", "publish to delivered"
    );
    for (id, carried) in ledger {
        line(id, carried);
    }
    if ledger.len() > 1 {
        line("together", &together(ledger));
    }
}

fn line(id: &str, carried: &Carried) {
    println!(
        "  {id:<10} {:>7} {:>12} {:>6} {:>8} {:>7.2} {:>19.1} ms",
        carried.tokens,
        carried.bytes,
        carried.paths.join("+"),
        carried.moves,
        rate(carried),
        carried.seconds() * 1e3
    );
}

/// The burst as a whole: from the first publish to the last delivery.
fn together(ledger: &Ledger) -> Carried {
    let mut whole = Carried {
        published_us: u64::MAX,
        ..Carried::default()
    };
    for carried in ledger.values() {
        whole.tokens += carried.tokens;
        whole.bytes += carried.bytes;
        whole.moves += carried.moves;
        whole.verified += carried.verified;
        whole.untouched += carried.untouched;
        whole.published_us = whole.published_us.min(carried.published_us);
        whole.delivered_us = whole.delivered_us.max(carried.delivered_us);
        for path in &carried.paths {
            if !whole.paths.contains(path) {
                whole.paths.push(path.clone());
            }
        }
    }
    whole
}

#[expect(clippy::cast_precision_loss, reason = "for reading")]
fn rate(carried: &Carried) -> f64 {
    let seconds = carried.seconds();
    if seconds > 0.0 {
        carried.bytes as f64 / 1e9 / seconds
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_burst_lasts_from_first_publish_to_last_delivery() {
        let one = |published_us, delivered_us| Carried {
            bytes: 1_000_000_000,
            published_us,
            delivered_us,
            ..Carried::default()
        };
        let ledger = Ledger::from([
            ("a".into(), one(1_000_000, 2_000_000)),
            ("b".into(), one(500_000, 1_500_000)),
        ]);
        let whole = together(&ledger);
        assert_eq!(
            (whole.bytes, whole.published_us, whole.delivered_us),
            (2_000_000_000, 500_000, 2_000_000)
        );
        assert!((rate(&whole) - 2.0 / 1.5).abs() < 1e-9);
        assert!(rate(&Carried::default()).abs() < 1e-9);
    }
}
