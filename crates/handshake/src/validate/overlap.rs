//! The proof that no two rows of a rank lie over each other.
//!
//! Rows of one placement and part form a lattice: a start plus multiples of a few strides. The proof
//! takes all lattices of a region at once. Lattices whose ranges do not meet are disjoint. Those whose
//! ranges meet are cut into cells of the largest stride among them: when each lattice, without that
//! axis, fits into one cell, rows of different cells cannot meet, and what is left is the same question
//! inside one cell. Interleaving (K and V, or layers, inside a page) is proven this way at any depth,
//! in time that does not depend on the number of rows. An arrangement that is disjoint but not nested in
//! cells is refused: nobody allocates like that.
//!
//! A cell's question takes an axis only off those lattices that have the cell's stride. Where many lattices
//! lie over each other with a different stride each, every lattice would be looked at once for each of
//! them; envelopes come from outside, so the looks are counted, and past [`most_looks`] nothing is proven.

/// One axis of a lattice, with more than one element.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    /// Bytes from one to the next.
    pub(super) stride: u64,
    /// Elements, at least 2.
    pub(super) count: u64,
    /// Which axis.
    pub(super) along: Along,
}

/// What an axis runs along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Along {
    Page,
    Token,
    Head,
    Layer,
}

impl Along {
    /// The name of its stride in an envelope file.
    pub(super) fn name(self) -> &'static str {
        match self {
            Along::Page => "page",
            Along::Token => "token",
            Along::Head => "head",
            Along::Layer => "layer",
        }
    }
}

/// The rows of one part of a placement. Ends are checked to fit 63 bits before a lattice is made.
#[derive(Clone, Debug)]
pub(super) struct Lattice {
    /// First byte.
    pub(super) start: u64,
    /// Bytes of one row.
    pub(super) row: u64,
    /// The axes.
    pub(super) axes: Vec<Axis>,
    /// Page group.
    pub(super) group: u16,
    /// The group whose pool it draws pages from.
    pub(super) pool: u16,
    /// Which placement this is.
    pub(super) placement: usize,
}

/// A place where the proof fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conflict {
    /// A placement's rows lie over each other along this axis.
    Within {
        placement: usize,
        along: Along,
        stride: u64,
        inner: u64,
    },
    /// Two placements' rows meet, or cannot be told apart.
    Between { placement: usize, other: usize },
}

impl Lattice {
    /// Bytes from the first row's start to the last row's end.
    fn extent(&self) -> u64 {
        self.axes.iter().fold(self.row, |sum, axis| {
            sum.saturating_add(axis.stride.saturating_mul(axis.count.saturating_sub(1)))
        })
    }

    /// One past its last byte.
    pub(super) fn end(&self) -> u64 {
        self.start.saturating_add(self.extent())
    }
}

/// How often the lattices of a region, together, are looked at before the proof is given up. Lattices that
/// share their strides are looked at five times each; few lattices may have as many strides as they like.
fn most_looks(lattices: usize) -> usize {
    lattices.saturating_mul(8).saturating_add(1000)
}

/// Every conflict among the lattices of one region, at most one for each group of lattices that meet.
pub(super) fn conflicts(lattices: Vec<Lattice>) -> Vec<Conflict> {
    let mut found = Vec::new();
    let mut looks = most_looks(lattices.len());
    let mut open = vec![lattices];
    while let Some(mut lattices) = open.pop() {
        if let [first, second, ..] = lattices.as_slice() {
            match looks.checked_sub(lattices.len()) {
                Some(left) => looks = left,
                None => {
                    found.push(Conflict::Between {
                        placement: first.placement,
                        other: second.placement,
                    });
                    return found;
                }
            }
        }
        lattices.sort_by_key(|lattice| (lattice.start, lattice.placement));
        let mut cluster: Vec<Lattice> = Vec::new();
        let mut reach = 0;
        for lattice in lattices {
            if !cluster.is_empty() && lattice.start >= reach {
                split(std::mem::take(&mut cluster), &mut open, &mut found);
            }
            reach = reach.max(lattice.end());
            cluster.push(lattice);
        }
        if !cluster.is_empty() {
            split(cluster, &mut open, &mut found);
        }
    }
    found
}

/// Cuts lattices whose ranges meet into cells of their largest stride, and opens the cell's question.
fn split(mut cluster: Vec<Lattice>, open: &mut Vec<Vec<Lattice>>, found: &mut Vec<Conflict>) {
    let Some(stride) = cluster.iter().flat_map(|l| &l.axes).map(|axis| axis.stride).max() else {
        // Single rows whose ranges meet.
        if let [first, second, ..] = cluster.as_slice() {
            found.push(Conflict::Between {
                placement: first.placement,
                other: second.placement,
            });
        }
        return;
    };
    let base = cluster[0].start;
    let mut one_pool = true;
    let pool = cluster[0].pool;
    let neighbour = |at: usize| usize::from(at == 0);
    for at in 0..cluster.len() {
        let other = cluster.get(neighbour(at)).map(|other| other.placement);
        let lattice = &mut cluster[at];
        let taken = lattice.axes.iter().position(|axis| axis.stride == stride);
        let taken = taken.map(|axis| lattice.axes.remove(axis));
        let inner = lattice.extent();
        let fits = |start: u64| start.checked_add(inner).is_some_and(|end| end <= stride);
        if let Some(axis) = taken.filter(|_| !fits(0)) {
            found.push(Conflict::Within {
                placement: lattice.placement,
                along: axis.along,
                stride,
                inner,
            });
            return;
        }
        let from_base = lattice.start - base;
        lattice.start = from_base.checked_rem(stride).unwrap_or(0);
        if !fits(lattice.start) {
            found.push(Conflict::Between {
                placement: lattice.placement,
                other: other.unwrap_or(lattice.placement),
            });
            return;
        }
        let pages = taken.is_some_and(|axis| axis.along == Along::Page);
        one_pool &= pages && lattice.pool == pool && from_base < stride;
    }
    if !one_pool {
        open.push(cluster);
        return;
    }
    // Cells are pages of one pool, and a page belongs to one group at a time: only rows of the same
    // group must be told apart.
    cluster.sort_by_key(|lattice| lattice.group);
    for group in cluster.chunk_by(|a, b| a.group == b.group) {
        open.push(group.to_vec());
    }
}
