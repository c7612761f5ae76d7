//! Which tokens a pair of ranks has in common, and where each side keeps them. Geometry only: no page
//! ids, so that both sides compute the same.

use kvferry_handshake::Dcp;

/// Largest period over which a count is remembered; beyond it, counting walks.
const COUNTED_PERIOD: u64 = 1 << 16;

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
    /// Tokens of the set in one period of both splits, where that is short enough to count.
    period: Option<(u64, u64)>,
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
    /// The sides split tokens differently: `[at, end)` are tokens of the prompt.
    Across { at: u64, end: u64, set: TokenSet },
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

    /// Whether the two shares have a token in common: token `t` is in a share iff `t` modulo its period
    /// lies in an interval, and two congruences have a solution iff they agree modulo the periods' gcd.
    pub(crate) fn meets(&self, other: &Share) -> bool {
        let common = gcd(self.period(), other.period());
        let (a, b) = (u64::from(self.dcp.interleave), u64::from(other.dcp.interleave));
        let (first, second) = (u64::from(self.rank) * a, u64::from(other.rank) * b);
        let ahead = (second % common + common - first % common) % common;
        ahead < a || (common - ahead) % common < b
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
            .filter(|both| *both <= COUNTED_PERIOD)
            .unwrap_or(spans[1].max(1));
        let mut set = TokenSet {
            source,
            target,
            pages: [source_page, target_page],
            grid,
            period: None,
        };
        if source != target && !source.is_whole() && !target.is_whole() {
            let period = lcm(source.period(), target.period()).filter(|p| *p <= COUNTED_PERIOD);
            set.period = period.map(|p| (p, set.walk_count(0, p)));
        }
        set
    }

    /// Tokens of the set in `[from, to)`.
    pub(crate) fn count(&self, from: u64, to: u64) -> u64 {
        if from >= to {
            return 0;
        }
        if self.source == self.target || self.source.is_whole() {
            return self.target.count_below(to) - self.target.count_below(from);
        }
        if self.target.is_whole() {
            return self.source.count_below(to) - self.source.count_below(from);
        }
        match self.period {
            Some((period, each)) => {
                let whole = (to - from) / period;
                whole * each + self.walk_count(from + whole * period, to)
            }
            None => self.walk_count(from, to),
        }
    }

    fn walk_count(&self, from: u64, to: u64) -> u64 {
        let mut count = 0;
        let mut at = from;
        while let Some((first, tokens)) = self.next(at, to) {
            count += tokens;
            at = first + tokens;
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
        Runs::Across {
            at: from,
            end: to,
            set: *self,
        }
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

impl Iterator for Runs {
    type Item = Run;

    #[inline]
    fn next(&mut self) -> Option<Run> {
        match self {
            Runs::Alike {
                entry,
                token,
                left,
                pages,
            } => {
                if *left == 0 {
                    return None;
                }
                let tokens = (pages[0] - token[0]).min(pages[1] - token[1]).min(*left);
                let run = Run {
                    entry: *entry,
                    token: *token,
                    tokens,
                    blocks: 1,
                    steps: [0; 2],
                };
                *left -= tokens;
                for side in 0..2 {
                    token[side] += tokens;
                    if token[side] == pages[side] {
                        token[side] = 0;
                        entry[side] += 1;
                    }
                }
                Some(run)
            }
            Runs::Across { at, end, set } => {
                let (first, tokens) = set.next(*at, *end)?;
                let (run, next) = across(set, first, tokens, *end);
                *at = next;
                Some(run)
            }
        }
    }
}

/// The run at token `first`, of which `tokens` follow each other on both sides, and the token after it.
fn across(set: &TokenSet, first: u64, tokens: u64, end: u64) -> (Run, u64) {
    let local = [set.source.dcp.local(first), set.target.dcp.local(first)];
    let entry = [local[0] / set.pages[0], local[1] / set.pages[1]];
    let token = [local[0] % set.pages[0], local[1] % set.pages[1]];
    let room = [set.pages[0] - token[0], set.pages[1] - token[1]];
    let mut run = Run {
        entry,
        token,
        tokens: tokens.min(room[0]).min(room[1]),
        blocks: 1,
        steps: [0; 2],
    };
    // Where one side holds all tokens, blocks repeat evenly: take as many as lie in both pages.
    let (split, whole) = match (set.source.is_whole(), set.target.is_whole()) {
        (true, false) => (1, 0),
        (false, true) => (0, 1),
        _ => return (run, first + run.tokens),
    };
    let share = if split == 1 { &set.target } else { &set.source };
    let (block, period) = (u64::from(share.dcp.interleave), share.period());
    if run.tokens < block {
        return (run, first + run.tokens);
    }
    run.blocks = (room[split] / block)
        .min((room[whole] - block) / period + 1)
        .min((end - first - block) / period + 1);
    if run.blocks > 1 {
        run.steps[split] = block;
        run.steps[whole] = period;
    }
    (run, first + (run.blocks - 1) * period + block)
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
