//! What bytes should be: a function of what each byte *is*, never of where it lies.

/// One filling of pages with one transfer's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Transfer id.
    pub transfer: String,
    /// Attempt.
    pub attempt: u32,
    /// How often the source filled pages for it.
    pub generation: u64,
}

/// What a row belongs to, in terms that both sides of a link share.
#[derive(Clone, Copy, Debug)]
pub struct Coordinates<'a> {
    /// Component name.
    pub component: &'a str,
    /// Global layer id.
    pub layer: u32,
    /// Part name.
    pub part: &'a str,
    /// Global token; of a whole page or slot, its entry in the page list.
    pub token: u64,
    /// Global head.
    pub head: u32,
}

impl Stamp {
    /// The first attempt of a transfer.
    pub fn of(transfer: &str) -> Stamp {
        Stamp {
            transfer: transfer.to_owned(),
            attempt: 0,
            generation: 0,
        }
    }

    /// Writes the bytes of a row.
    pub fn write(&self, row: Coordinates<'_>, out: &mut [u8]) {
        let mut seed = Seed::new("pattern");
        seed.text(&self.transfer)
            .number(self.attempt.into())
            .number(self.generation);
        seed.text(row.component).number(row.layer.into()).text(row.part);
        seed.number(row.token).number(row.head.into());
        seed.write(out);
    }
}

/// Writes what lies in a row that no transfer has filled: it differs from place to place, and by `nonce`.
pub fn poison(nonce: u64, region: u16, offset: u64, out: &mut [u8]) {
    let mut seed = Seed::new("poison");
    seed.number(nonce).number(region.into()).number(offset);
    seed.write(out);
}

/// A hash that grows with what it is given: multiplied to 128 bits and folded.
struct Seed(u64);

const FIRST: u64 = 0x8ebc_6af0_9c88_c6e3;
const SECOND: u64 = 0x5899_65cc_7537_4cc3;

impl Seed {
    fn new(what: &str) -> Seed {
        let mut seed = Seed(FIRST);
        seed.text(what);
        seed
    }

    fn number(&mut self, value: u64) -> &mut Seed {
        self.0 = fold(self.0 ^ SECOND, value.wrapping_add(FIRST)).wrapping_add(self.0.rotate_left(23));
        self
    }

    fn text(&mut self, text: &str) -> &mut Seed {
        for byte in text.bytes() {
            self.number(byte.into());
        }
        // The length keeps "ab" + "c" and "a" + "bc" apart.
        self.number(text.len() as u64)
    }

    fn write(&self, out: &mut [u8]) {
        for (at, word) in (1u64..).zip(out.chunks_mut(8)) {
            let bytes = fold(self.0 ^ at.wrapping_mul(FIRST), SECOND ^ at.rotate_left(32)).to_le_bytes();
            word.copy_from_slice(&bytes[..word.len()]);
        }
    }
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let [low, high] = [product & u128::from(u64::MAX), product >> 64];
    u64::try_from(low ^ high).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_coordinate_changes_every_word() {
        let stamp = Stamp::of("req");
        let row = Coordinates {
            component: "kv",
            layer: 1,
            part: "k",
            token: 5,
            head: 2,
        };
        let (mut attempt, mut generation) = (stamp.clone(), stamp.clone());
        (attempt.attempt, generation.generation) = (1, 1);
        let cases = [
            (&stamp, row),
            (&Stamp::of("rer"), row),
            (&attempt, row),
            (&generation, row),
            (
                &stamp,
                Coordinates {
                    component: "draft",
                    ..row
                },
            ),
            (&stamp, Coordinates { layer: 2, ..row }),
            (&stamp, Coordinates { part: "v", ..row }),
            (
                &stamp,
                Coordinates {
                    token: 2,
                    head: 5,
                    ..row
                },
            ),
            (&stamp, Coordinates { token: 6, ..row }),
            (&stamp, Coordinates { head: 3, ..row }),
        ];
        let rows: Vec<[u8; 64]> = cases
            .iter()
            .map(|(stamp, row)| {
                let mut bytes = [0; 64];
                stamp.write(*row, &mut bytes);
                bytes
            })
            .collect();
        let words: HashSet<&[u8]> = rows.iter().flat_map(|row| row.chunks(8)).collect();
        assert_eq!(words.len(), 8 * cases.len());
    }

    #[test]
    fn poison_differs_by_place_and_nonce() {
        let words: HashSet<[u8; 8]> = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
            .map(|(nonce, region, offset)| {
                let mut bytes = [0; 8];
                poison(nonce, region, offset, &mut bytes);
                bytes
            })
            .into();
        assert_eq!(words.len(), 4);
    }
}
