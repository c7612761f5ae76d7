//! Which tokens a pair of ranks has in common, and where each side keeps them. Geometry only: no page
//! ids, so that both sides compute the same.

use kvferry_handshake::Dcp;

/// The longest grid, in tokens, that is made to fit both sides; beyond it, it fits the target alone.
const LONGEST_GRID: u64 = 1 << 16;

/// The tokens that one rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Share {
    /// How tokens are split.
    pub(crate) dcp: Dcp,
    /// Which of them.
    pub(crate) rank: u32,
}

/// The tokens that a prefill rank and a decode rank both hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenSet {
    pub(crate) source: Share,
    pub(crate) target: Share,
    /// Tokens a page, on each side.
    pub(crate) pages: [u64; 2],
    /// The absolute grid on which chunks are cut, in tokens: whole pages and DCP periods of both sides.
    pub(crate) grid: u64,
}

/// Tokens that lie in one page on both sides: `blocks` blocks of `tokens` consecutive ones, `steps` local
/// tokens apart on each side. Index 0 is the source, 1 the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Position in the page list.
    pub(crate) entry: [u64; 2],
    /// First token in that page.
    pub(crate) token: [u64; 2],
    pub(crate) tokens: u64,
    pub(crate) blocks: u64,
    pub(crate) steps: [u64; 2],
}

/// The runs of a range, in token order.
#[derive(Clone, Debug)]
pub(crate) enum Runs {
    /// Both sides number the tokens alike: `[at, end)` are local tokens (or pages, or slots).
    Alike {
        entry: [u64; 2],
        token: [u64; 2],
        left: u64,
        pages: [u64; 2],
    },
    /// One side holds all tokens, the other blocks of them.
    Blocks(Blocks),
    /// Both sides split tokens, and differently: `[at, end)` are tokens of the prompt.
    Across { at: u64, end: u64, set: TokenSet },
}

/// See [`Runs::Blocks`]. Positions are kept from run to run, because dividing is slow.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    entry: [u64; 2],
    token: [u64; 2],
    pages: [u64; 2],
    /// Tokens of the prompt from here to the end of the range.
    left: u64,
    /// Tokens from here to the end of the block.
    rest: u64,
    /// Tokens in a block, and from one block to the next.
    block: u64,
    period: u64,
    /// The side that holds all tokens, and the other.
    whole: usize,
    split: usize,
}

impl Share {
    pub(crate) fn new(dcp: Dcp, dcp_rank: u32) -> Share {
        if dcp.size > 1 {
            Share { dcp, rank: dcp_rank }
        } else {
            Share {
                dcp: Dcp::NONE,
                rank: 0,
            }
        }
    }

    /// Tokens after which the split repeats.
    fn period(&self) -> u64 {
        u64::from(self.dcp.size) * u64::from(self.dcp.interleave)
    }

    fn is_whole(&self) -> bool {
        self.dcp.size == 1
    }

    pub(crate) fn count_below(&self, token: u64) -> u64 {
        self.dcp.count_below(self.rank, token)
    }

    fn count_between(&self, from: u64, to: u64) -> u64 {
        self.count_below(to) - self.count_below(from)
    }

    /// The first token of the share at or after `token`.
    fn next(&self, token: u64) -> u64 {
        if self.is_whole() {
            return token;
        }
        let (g, n) = (u64::from(self.dcp.interleave), u64::from(self.dcp.size));
        let block = token / g;
        let ahead = (u64::from(self.rank) + n - block % n) % n;
        if ahead == 0 { token } else { (block + ahead) * g }
    }

    /// How many tokens from `token`, which is of the share, follow each other in it.
    fn consecutive(&self, token: u64) -> u64 {
        if self.is_whole() {
            return u64::MAX;
        }
        let g = u64::from(self.dcp.interleave);
        g - token % g
    }

    /// Whether the two shares have a token in common.
    pub(crate) fn meets(&self, other: &Share) -> bool {
        self.common(other) > 0
    }

    /// Tokens that the two shares have in common in one period of both. Token `t` is in a share iff `t`
    /// modulo its period lies in an interval as long as the interleave. Of two congruences, one solution lies
    /// in each common period iff they agree modulo the periods' gcd: so count the pairs that agree.
    fn common(&self, other: &Share) -> u64 {
        let gcd = gcd(self.period(), other.period());
        let (ours, theirs) = (u64::from(self.dcp.interleave), u64::from(other.dcp.interleave));
        // Whole rounds modulo the gcd meet everything once; what is left are two intervals on a circle.
        let (left, other_left) = (ours % gcd, theirs % gcd);
        let rounds = ours / gcd * theirs + theirs / gcd * left;
        let first = u64::from(self.rank) * ours % gcd;
        let other_first = u64::from(other.rank) * theirs % gcd;
        let overlap = |a: u64, b: u64| (a + left).min(b + other_left).saturating_sub(a.max(b));
        rounds
            + overlap(first, other_first)
            + overlap(first + gcd, other_first)
            + overlap(first, other_first + gcd)
    }
}

impl TokenSet {
    pub(crate) fn new(source: Share, target: Share, source_page: u64, target_page: u64) -> TokenSet {
        // One page of local tokens spans `page * size` tokens, and the interleave divides the page.
        let spans = [
            source_page.saturating_mul(u64::from(source.dcp.size)),
            target_page.saturating_mul(u64::from(target.dcp.size)),
        ];
        let grid = lcm(spans[0], spans[1])
            .filter(|both| *both <= LONGEST_GRID)
            .unwrap_or(spans[1].max(1));
        TokenSet {
            source,
            target,
            pages: [source_page, target_page],
            grid,
        }
    }

    /// Tokens of the set in `[from, to)`.
    pub(crate) fn count(&self, from: u64, to: u64) -> u64 {
        if from >= to {
            return 0;
        }
        if self.source == self.target || self.source.is_whole() {
            return self.target.count_between(from, to);
        }
        if self.target.is_whole() {
            return self.source.count_between(from, to);
        }
        let whole = match lcm(self.source.period(), self.target.period()) {
            Some(period) => ((to - from) / period, period),
            None => (0, 0),
        };
        let rest = from + whole.0 * whole.1;
        whole.0 * self.source.common(&self.target) + self.walk_count(rest, to)
    }

    /// The same for less than a period: block by block of the side whose blocks are further apart. The
    /// number of steps is below the square root of the tokens.
    fn walk_count(&self, from: u64, to: u64) -> u64 {
        let (few, many) = if self.source.period() > self.target.period() {
            (&self.source, &self.target)
        } else {
            (&self.target, &self.source)
        };
        let mut count = 0;
        let mut at = few.next(from);
        while at < to {
            let end = (at + few.consecutive(at)).min(to);
            count += many.count_between(at, end);
            at = few.next(end);
        }
        count
    }

    /// The first tokens in `[at, end)` that both sides hold and that follow each other on both.
    fn next(&self, mut at: u64, end: u64) -> Option<(u64, u64)> {
        loop {
            let ours = self.source.next(at);
            let theirs = self.target.next(ours);
            if theirs >= end {
                return None;
            }
            if ours == theirs {
                let tokens = self.source.consecutive(ours).min(self.target.consecutive(ours));
                return Some((ours, tokens.min(end - ours)));
            }
            at = theirs;
        }
    }

    /// The tokens `[from, to)` of the prompt that decode pages `[first, last)` may hold.
    pub(crate) fn tokens_of_entries(&self, first: u64, last: u64) -> (u64, u64) {
        let span = self.pages[1] * u64::from(self.target.dcp.size);
        (first.saturating_mul(span), last.saturating_mul(span))
    }

    /// The runs of tokens `[from, to)`.
    pub(crate) fn runs(&self, from: u64, to: u64) -> Runs {
        if self.source == self.target {
            let (from, to) = (self.target.count_below(from), self.target.count_below(to));
            return Runs::alike(from, to, self.pages);
        }
        let (whole, split) = match (self.source.is_whole(), self.target.is_whole()) {
            (true, false) => (0, 1),
            (false, true) => (1, 0),
            _ => {
                return Runs::Across {
                    at: from,
                    end: to,
                    set: *self,
                };
            }
        };
        let share = if split == 0 { &self.source } else { &self.target };
        let first = share.next(from);
        let local = [self.source.dcp.local(first), self.target.dcp.local(first)];
        Runs::Blocks(Blocks {
            entry: [local[0] / self.pages[0], local[1] / self.pages[1]],
            token: [local[0] % self.pages[0], local[1] % self.pages[1]],
            pages: self.pages,
            left: to.saturating_sub(first),
            rest: share.consecutive(first),
            block: u64::from(share.dcp.interleave),
            period: share.period(),
            whole,
            split,
        })
    }
}

impl Runs {
    /// Local tokens (or pages, or slots, with pages of 1) `[from, to)`, numbered alike on both sides.
    pub(crate) fn alike(from: u64, to: u64, pages: [u64; 2]) -> Runs {
        Runs::Alike {
            entry: pages.map(|page| from / page),
            token: pages.map(|page| from % page),
            left: to.saturating_sub(from),
            pages,
        }
    }
}

impl Runs {
    /// Goes to the next run. Field by field into a place that the caller keeps: a run that is returned is copied whole
    /// through memory, which waits for its parts to be stored, and those for all stores before them (measured: half of
    /// the time of walking small pages).
    #[inline(always)]
    pub(crate) fn go_on(&mut self, run: &mut Run) -> bool {
        let Runs::Alike {
            entry,
            token,
            left,
            pages,
        } = self
        else {
            return self.go_on_apart(run);
        };
        if *left == 0 {
            return false;
        }
        let tokens = (pages[0] - token[0]).min(pages[1] - token[1]).min(*left);
        run.tokens = tokens;
        run.blocks = 1;
        *left -= tokens;
        for side in 0..2 {
            run.entry[side] = entry[side];
            run.token[side] = token[side];
            run.steps[side] = 0;
            token[side] += tokens;
            if token[side] == pages[side] {
                token[side] = 0;
                entry[side] += 1;
            }
        }
        true
    }

    /// The same where the sides do not number tokens alike.
    #[inline(never)]
    fn go_on_apart(&mut self, run: &mut Run) -> bool {
        let next = match self {
            Runs::Alike { .. } => None,
            Runs::Blocks(blocks) => blocks.next(),
            Runs::Across { at, end, set } => set.next(*at, *end).map(|(first, tokens)| {
                let local = [set.source.dcp.local(first), set.target.dcp.local(first)];
                let token = [local[0] % set.pages[0], local[1] % set.pages[1]];
                let room = (set.pages[0] - token[0]).min(set.pages[1] - token[1]);
                *at = first + tokens.min(room);
                Run {
                    entry: [local[0] / set.pages[0], local[1] / set.pages[1]],
                    token,
                    tokens: tokens.min(room),
                    ..Run::NONE
                }
            }),
        };
        *run = next.unwrap_or(Run::NONE);
        run.tokens > 0
    }
}

impl Iterator for Runs {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let mut run = Run::NONE;
        self.go_on(&mut run).then_some(run)
    }
}

impl Run {
    /// No tokens.
    pub(crate) const NONE: Run = Run {
        entry: [0; 2],
        token: [0; 2],
        tokens: 0,
        blocks: 1,
        steps: [0; 2],
    };
}

impl Blocks {
    /// The next run: as many whole blocks as lie in one page on both sides, or a piece of one.
    fn next(&mut self) -> Option<Run> {
        if self.left == 0 {
            return None;
        }
        let (whole, split) = (self.whole, self.split);
        let room = [self.pages[0] - self.token[0], self.pages[1] - self.token[1]];
        let tokens = self.rest.min(self.left).min(room[0]).min(room[1]);
        let mut run = Run {
            entry: self.entry,
            token: self.token,
            tokens,
            blocks: 1,
            steps: [0; 2],
        };
        if tokens < self.rest {
            // The range or a page ends inside the block.
            self.go_on(tokens, tokens);
            self.rest -= tokens;
            return Some(run);
        }
        let next = self.period + self.block;
        if tokens == self.block && self.left >= next && room[whole] >= next && room[split] >= 2 * self.block {
            run.blocks = (room[split] / self.block)
                .min((room[whole] - self.block) / self.period + 1)
                .min((self.left - self.block) / self.period + 1);
            run.steps[split] = self.block;
            run.steps[whole] = self.period;
        }
        let before = (run.blocks - 1) * self.block + tokens;
        self.go_on(
            (run.blocks - 1) * self.period + tokens + self.period - self.block,
            before,
        );
        self.rest = self.block;
        Some(run)
    }

    /// Goes on by this many tokens of the prompt, and of the side that holds blocks.
    fn go_on(&mut self, prompt: u64, held: u64) {
        self.left = self.left.saturating_sub(prompt);
        self.token[self.whole] += prompt;
        self.token[self.split] += held;
        for side in 0..2 {
            let page = self.pages[side];
            if self.token[side] >= page {
                self.token[side] -= page;
                self.entry[side] += 1;
            }
            if self.token[side] >= page {
                self.entry[side] += self.token[side] / page;
                self.token[side] %= page;
            }
        }
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

fn lcm(a: u64, b: u64) -> Option<u64> {
    let common = gcd(a, b);
    if common == 0 {
        return None;
    }
    (a / common).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every split of up to 4 ranks with interleaves that divide 12, in pairs.
    fn pairs() -> impl Iterator<Item = TokenSet> {
        let shares = || {
            [1, 2, 3, 4].into_iter().flat_map(|size| {
                [1, 2, 3, 4, 6, 12].into_iter().flat_map(move |interleave| {
                    (0..size).map(move |rank| Share::new(Dcp { size, interleave }, rank))
                })
            })
        };
        shares().flat_map(move |source| {
            shares().flat_map(move |target| {
                [(12, 12), (12, 24), (36, 12)]
                    .into_iter()
                    .map(move |(a, b)| TokenSet::new(source, target, a, b))
            })
        })
    }

    fn both_hold(set: &TokenSet, token: u64) -> bool {
        [set.source, set.target]
            .iter()
            .all(|share| share.dcp.owner(token) == share.rank)
    }

    #[test]
    fn counts_and_meets_equal_trying_every_token() {
        for set in pairs() {
            let held: Vec<u64> = (0..700).filter(|token| both_hold(&set, *token)).collect();
            // Every period of these splits is below 600.
            assert_eq!(set.source.meets(&set.target), !held.is_empty(), "{set:?}");
            for (from, to) in [(0, 1), (0, 700), (5, 33), (47, 48), (13, 650), (40, 40)] {
                let expected = held.iter().filter(|token| (from..to).contains(*token)).count() as u64;
                assert_eq!(set.count(from, to), expected, "{set:?} {from} {to}");
            }
        }
    }

    #[test]
    fn runs_hold_every_token_once_in_order_and_inside_one_page() {
        for set in pairs() {
            for (from, to) in [(0, 100), (7, 91), (24, 72), (95, 96)] {
                let mut found = Vec::new();
                for run in set.runs(from, to) {
                    for block in 0..run.blocks {
                        for token in 0..run.tokens {
                            let local = [0, 1].map(|side| {
                                let in_page = run.token[side] + block * run.steps[side] + token;
                                assert!(in_page < set.pages[side], "{set:?} {run:?}");
                                run.entry[side] * set.pages[side] + in_page
                            });
                            let globals = [
                                set.source.dcp.global(set.source.rank, local[0]),
                                set.target.dcp.global(set.target.rank, local[1]),
                            ];
                            assert_eq!(globals[0], globals[1], "{set:?} {run:?}");
                            found.push(globals[0]);
                        }
                    }
                }
                let expected: Vec<u64> = (from..to).filter(|token| both_hold(&set, *token)).collect();
                assert_eq!(found, expected, "{set:?} {from} {to}");
            }
        }
    }

    #[test]
    fn blocks_that_lie_in_one_page_are_one_run() {
        let split = Dcp {
            size: 8,
            interleave: 1,
        };
        let set = TokenSet::new(Share::new(Dcp::NONE, 0), Share::new(split, 3), 64, 64);
        let runs: Vec<Run> = set.runs(0, 512).collect();
        assert_eq!(runs.len(), 8, "one for each page of the source");
        assert!(runs.iter().all(|run| run.blocks == 8 && run.steps == [8, 1]));
    }

    #[test]
    fn the_grid_fits_pages_and_periods_of_both_sides() {
        for set in pairs() {
            for share in [set.source, set.target] {
                assert_eq!(set.grid % share.period(), 0);
            }
            assert_eq!(set.grid % (set.pages[0] * u64::from(set.source.dcp.size)), 0);
            assert_eq!(set.grid % (set.pages[1] * u64::from(set.target.dcp.size)), 0);
        }
    }
}
