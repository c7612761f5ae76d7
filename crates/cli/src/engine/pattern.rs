//! The pattern that pages are filled with: a function of what a byte *is*, never of where it lies.
//!
//! Every row (one head of one token of one part of one layer) has a seed made from the transfer, its attempt and
//! generation, and the row's global coordinates. So two engines of different geometry agree on every byte, and a row that
//! came from another place, another attempt or another life of the pages differs in every word.

/// Which filling of pages a byte belongs to: transfer, attempt and generation in one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filling(u64);

impl Filling {
    /// The filling of one attempt of a transfer. `generation` is the filling's own number, for sources
    /// that fill pages anew within an attempt; it has nothing to do with the generation of a region.
    pub fn new(transfer: &str, attempt: u32, generation: u64) -> Filling {
        let seed = absorb(name_hash(transfer), u64::from(attempt));
        Filling(absorb(seed, generation))
    }

    /// The part of the seed that all rows of one part of one layer share.
    pub fn of_part(self, component: u64, layer: u32, part: u64) -> PartSeed {
        PartSeed(absorb(absorb(absorb(self.0, component), u64::from(layer)), part))
    }
}

/// A filling's seed within one part of one layer.
#[derive(Clone, Copy, Debug)]
pub struct PartSeed(u64);

impl PartSeed {
    /// Seed of a row: a token (or first token of a page, or slot) and a head, both global.
    pub fn row(self, token: u64, head: u32) -> u64 {
        absorb(absorb(self.0, token), u64::from(head))
    }
}

/// Seed of the poison of a row, which no pattern shares: it depends on where the row lies and on `nonce`.
pub fn poison_seed(nonce: u64, region: u16, offset: u64) -> u64 {
    absorb(absorb(absorb(0x706f_6973_6f6e, nonce), u64::from(region)), offset)
}

/// A name as a number, for [`Filling::of_part`].
pub fn name_hash(name: &str) -> u64 {
    // FNV-1a, then mixed: names are short and few.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    mix(hash)
}

/// Writes the bytes of the row with this seed. A shorter `out` is a prefix of a longer one.
pub fn fill(seed: u64, out: &mut [u8]) {
    let mut counter = seed;
    let mut words = out.chunks_exact_mut(8);
    for word in &mut words {
        counter = counter.wrapping_add(GOLDEN);
        word.copy_from_slice(&mix(counter).to_le_bytes());
    }
    let tail = words.into_remainder();
    let last = mix(counter.wrapping_add(GOLDEN)).to_le_bytes();
    tail.copy_from_slice(&last[..tail.len()]);
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn absorb(seed: u64, value: u64) -> u64 {
    mix(seed.wrapping_mul(GOLDEN) ^ value.wrapping_add(GOLDEN))
}

/// The finalizer of SplitMix64: a bijection that changes about half the bits for each bit changed.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn row(filling: Filling, component: &str, layer: u32, part: &str, token: u64, head: u32) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        fill(
            filling
                .of_part(name_hash(component), layer, name_hash(part))
                .row(token, head),
            &mut bytes,
        );
        bytes
    }

    #[test]
    fn every_coordinate_changes_every_word() {
        let filling = Filling::new("req", 0, 0);
        let rows = [
            row(filling, "kv", 1, "k", 5, 2),
            row(Filling::new("rer", 0, 0), "kv", 1, "k", 5, 2),
            row(Filling::new("req", 1, 0), "kv", 1, "k", 5, 2),
            row(Filling::new("req", 0, 1), "kv", 1, "k", 5, 2),
            row(filling, "draft", 1, "k", 5, 2),
            row(filling, "kv", 2, "k", 5, 2),
            row(filling, "kv", 1, "v", 5, 2),
            row(filling, "kv", 1, "k", 2, 5),
            row(filling, "kv", 1, "k", 6, 2),
            row(filling, "kv", 1, "k", 5, 3),
        ];
        for word in 0..8 {
            let distinct: HashSet<&[u8]> = rows.iter().map(|row| &row[word * 8..][..8]).collect();
            assert_eq!(distinct.len(), rows.len(), "word {word}");
        }
    }

    #[test]
    fn no_word_repeats_within_a_row() {
        let mut bytes = vec![0; 4096];
        fill(7, &mut bytes);
        let distinct: HashSet<&[u8]> = bytes.chunks(8).collect();
        assert_eq!(distinct.len(), 512);
    }

    #[test]
    fn odd_lengths_are_prefixes() {
        let mut long = [0; 24];
        fill(3, &mut long);
        for len in 0..24 {
            let mut short = vec![0; len];
            fill(3, &mut short);
            assert_eq!(short, long[..len]);
        }
    }

    #[test]
    fn poison_differs_by_place_and_nonce() {
        let seeds = [
            poison_seed(0, 0, 0),
            poison_seed(1, 0, 0),
            poison_seed(0, 1, 0),
            poison_seed(0, 0, 1),
        ];
        assert_eq!(seeds.iter().collect::<HashSet<_>>().len(), 4);
    }
}
