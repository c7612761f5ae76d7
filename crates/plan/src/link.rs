//! The plan of a link: from two envelopes to streams.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use kvferry_handshake::{Dcp, Envelope, Mismatch, Placement, Unit};

use crate::mismatch::{self, Gaps};
use crate::owners::{self, Group, Plane};
use crate::pages::PageRules;
use crate::spread::{Assignment, spread};
use crate::stream::{Axis, Both, LayerBase, SOURCE, Stream, TARGET, inner_steps};
use crate::tokens::{Share, TokenSet};
use crate::{CHUNK_BYTES, PLANNER_VERSION, coverage, soundness, whole};

/// Most layers, times parts, of all streams of a link: far above any engine, low enough for a hostile envelope.
const MOST_PLACED: usize = 1 << 22;

/// Most streams of a link. Only token splits that meet everywhere, such as DCP sizes without a common divisor, make more of
/// them than there are ranks: their number is the product of both sizes.
const MOST_STREAMS: usize = 1 << 15;

/// Who sends what to whom on one link, for every pair of ranks. Made once, from two envelopes.
#[derive(Clone, Debug)]
pub struct LinkPlan {
    /// Ascending by (decode rank, prefill rank).
    pub(crate) streams: Vec<Stream>,
    /// Pairs that have streams: ((decode rank, prefill rank), positions in `streams`), ascending.
    pairs: Vec<((u32, u32), Range<usize>)>,
    /// What page lists must look like, by rank.
    pub(crate) rules: Both<Vec<PageRules>>,
    /// Target size of a chunk.
    pub(crate) chunk_bytes: u64,
    digest: [u8; 32],
}

/// A component that both sides have.
pub(crate) struct Pair<'a> {
    pub(crate) envelopes: Both<&'a Envelope>,
    /// Its position on each side.
    pub(crate) at: Both<u16>,
    /// For each part of the prefill side its position on the decode side.
    pub(crate) parts: Vec<Option<u16>>,
}

impl LinkPlan {
    /// Plans a link. Fails with *every* mismatch in coverage, never just the first: what the decode side wants and
    /// no prefill rank has, and what a side declares without a place for it.
    pub fn new(prefill: &Envelope, decode: &Envelope) -> Result<LinkPlan, Vec<Mismatch>> {
        LinkPlan::with_chunk_bytes(prefill, decode, CHUNK_BYTES)
    }

    /// The same with chunks of about `chunk_bytes` bytes; both daemons must use the same.
    pub fn with_chunk_bytes(
        prefill: &Envelope,
        decode: &Envelope,
        chunk_bytes: u64,
    ) -> Result<LinkPlan, Vec<Mismatch>> {
        let envelopes = [prefill, decode];
        soundness::check(envelopes)?;
        let (pairs, mut mismatches) = pair_components(envelopes);
        let mut streams = Vec::new();
        let mut lacking = HashSet::new();
        for pair in &pairs {
            let before = mismatches.len();
            match pair.plan(&mut streams) {
                Ok(gaps) => mismatches.extend(gaps.into_mismatches(pair)),
                Err(mismatch) => mismatches.push(*mismatch),
            }
            if mismatches.len() > before {
                lacking.insert(pair.at[SOURCE]);
            }
        }
        // What nobody on the decode side asks for has not been looked at yet.
        whole::check(envelopes, SOURCE, |at| lacking.contains(&at), &mut mismatches);
        whole::check(envelopes, TARGET, |_| false, &mut mismatches);
        if !mismatches.is_empty() {
            return Err(mismatches);
        }
        coverage::prove(&pairs, &streams)?;
        streams.sort_by_key(|stream| (stream.decode_rank, stream.prefill_rank));
        let rules = envelopes.map(|envelope| {
            let ranks = envelope.ranks.iter();
            ranks
                .filter_map(|rank| PageRules::new(envelope, rank.rank))
                .collect()
        });
        Ok(LinkPlan {
            pairs: pair_ranges(&streams),
            digest: digest(&streams, chunk_bytes),
            chunk_bytes,
            streams,
            rules,
        })
    }

    /// Digest over [`PLANNER_VERSION`], the size of chunks and every stream: equal on both daemons or no byte moves.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Prefill ranks that send something to `decode_rank`, ascending.
    pub fn sources(&self, decode_rank: u32) -> Vec<u32> {
        let pairs = self.pairs.iter().map(|(pair, _)| *pair);
        pairs
            .filter(|(decode, _)| *decode == decode_rank)
            .map(|(_, prefill)| prefill)
            .collect()
    }

    /// Decode ranks that `prefill_rank` sends something to, ascending.
    pub fn targets(&self, prefill_rank: u32) -> Vec<u32> {
        let pairs = self.pairs.iter().map(|(pair, _)| *pair);
        pairs
            .filter(|(_, prefill)| *prefill == prefill_rank)
            .map(|(decode, _)| decode)
            .collect()
    }

    /// The streams of one pair.
    pub(crate) fn streams_of(&self, prefill_rank: u32, decode_rank: u32) -> Range<usize> {
        let at = self
            .pairs
            .binary_search_by_key(&(decode_rank, prefill_rank), |(pair, _)| *pair);
        at.map_or(0..0, |at| self.pairs[at].1.clone())
    }
}

fn pair_ranges(streams: &[Stream]) -> Vec<((u32, u32), Range<usize>)> {
    let mut pairs: Vec<((u32, u32), Range<usize>)> = Vec::new();
    for (at, stream) in streams.iter().enumerate() {
        let pair = (stream.decode_rank, stream.prefill_rank);
        match pairs.last_mut() {
            Some((last, range)) if *last == pair => range.end = at + 1,
            _ => pairs.push((pair, at..at + 1)),
        }
    }
    pairs
}

fn digest(streams: &[Stream], chunk_bytes: u64) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"kvferry plan");
    hasher.update(&PLANNER_VERSION.to_le_bytes());
    hasher.update(&chunk_bytes.to_le_bytes());
    let mut bytes = Vec::new();
    streams
        .iter()
        .for_each(|stream| stream.digest(&mut hasher, &mut bytes));
    *hasher.finalize().as_bytes()
}

/// The decode side's components, each with the prefill side's of the same name.
fn pair_components(envelopes: Both<&Envelope>) -> (Vec<Pair<'_>>, Vec<Mismatch>) {
    let [prefill, decode] = envelopes;
    let mut pairs = Vec::new();
    let mut mismatches = Vec::new();
    for (on_decode, component) in (0u16..).zip(&decode.components) {
        let Some((on_prefill, other)) = prefill.component(&component.name) else {
            mismatches.push(mismatch::no_component(&component.name));
            continue;
        };
        let parts = other
            .parts
            .iter()
            .map(|part| {
                let at = component.parts.iter().position(|p| p.name == part.name)?;
                u16::try_from(at).ok()
            })
            .collect();
        pairs.push(Pair {
            envelopes,
            at: [on_prefill, on_decode],
            parts,
        });
    }
    (pairs, mismatches)
}

impl Pair<'_> {
    pub(crate) fn component(&self, side: usize) -> &kvferry_handshake::Component {
        &self.envelopes[side].components[usize::from(self.at[side])]
    }

    pub(crate) fn unit(&self) -> Unit {
        self.component(TARGET).unit
    }

    pub(crate) fn dcp(&self, side: usize) -> Dcp {
        match self.unit() {
            // A slot is one sequence's state: tokens do not split it.
            Unit::Slot => Dcp::NONE,
            Unit::Token | Unit::Page => self.component(side).dcp,
        }
    }

    /// The tokens that a rank holds of the component.
    pub(crate) fn share(&self, side: usize, rank: u32) -> Share {
        let ranks = &self.envelopes[side].ranks;
        let dcp_rank = usize::try_from(rank)
            .ok()
            .and_then(|rank| ranks.get(rank))
            .map_or(0, |rank| rank.dcp_rank);
        Share::new(self.dcp(side), dcp_rank)
    }

    pub(crate) fn page_size(&self, side: usize) -> u32 {
        let group = usize::from(self.component(side).page_group);
        self.envelopes[side].page_groups[group].page_size
    }

    fn placement(&self, side: usize, rank: u32, number: usize) -> Option<&Placement> {
        let rank = self.envelopes[side].ranks.get(usize::try_from(rank).ok()?)?;
        rank.placements.get(number)
    }

    /// Adds the component's streams; what nobody holds comes back.
    fn plan(&self, streams: &mut Vec<Stream>) -> Result<Gaps, Box<Mismatch>> {
        mismatch::check_carriable(self)?;
        let mut gaps = Gaps::default();
        let mut placed: usize = streams.iter().map(|s| s.layers.len() * s.parts.len()).sum();
        for group in owners::groups(self.envelopes, self.at, &self.parts) {
            let layers = group.layers();
            if group.owners[SOURCE].is_empty() {
                gaps.layers(&group);
                continue;
            }
            let classes = self.dcp(SOURCE).size;
            let spread = spread(&group, layers.len(), classes, |side, rank| self.share(side, rank));
            let (assignments, missing) = spread.ok_or_else(|| self.too_large())?;
            for gap in missing {
                gaps.rows(&layers, gap);
            }
            let planes = assignments
                .iter()
                .map(|a| group.planes_of(&layers, a.layers.0, a.layers.1).len());
            placed += planes.sum::<usize>();
            if placed > MOST_PLACED || streams.len() + assignments.len() > MOST_STREAMS {
                return Err(self.too_large());
            }
            for assignment in assignments {
                self.streams(&group, &layers, assignment, streams)
                    .ok_or_else(|| Box::new(mismatch::internal("an address is beyond 64 bits")))?;
            }
        }
        Ok(gaps)
    }

    fn too_large(&self) -> Box<Mismatch> {
        Box::new(mismatch::too_large(&self.component(TARGET).name))
    }

    /// The streams of one assignment: layers that lie alike share one.
    fn streams(
        &self,
        group: &Group,
        layers: &[u32],
        assignment: Assignment,
        streams: &mut Vec<Stream>,
    ) -> Option<()> {
        let first_new = streams.len();
        let mut known: HashMap<(Lie, Vec<u16>), usize> = HashMap::new();
        let planes = group.planes_of(layers, assignment.layers.0, assignment.layers.1);
        for layer in planes.chunk_by(|a, b| a.layer == b.layer) {
            for (lie, parts, base) in self.lies(group, layer, assignment)? {
                let at = *known.entry((lie, parts)).or_insert_with_key(|(lie, parts)| {
                    streams.push(self.empty_stream(group, assignment, lie, parts.clone()));
                    streams.len() - 1
                });
                streams[at].layers.push(base);
            }
        }
        streams[first_new..].iter_mut().for_each(Stream::settle);
        Some(())
    }

    /// How one layer's parts lie: those that lie next to each other on both sides are taken together.
    fn lies(
        &self,
        group: &Group,
        planes: &[Plane],
        assignment: Assignment,
    ) -> Option<Vec<(Lie, Vec<u16>, LayerBase)>> {
        let mut parts = Vec::with_capacity(planes.len());
        for plane in planes {
            parts.push(self.part_lie(group, plane, assignment)?);
        }
        parts.sort_by_key(|part| (part.base.region[TARGET], part.base.offset[TARGET]));
        let mut sets: Vec<(Lie, Vec<u16>, LayerBase)> = Vec::new();
        let mut last: Option<PartLie> = None;
        for part in parts {
            let step = last.as_ref().and_then(|last| last.step_to(&part));
            match (sets.last_mut(), step) {
                (Some((lie, members, _)), Some(step)) if members.len() == 1 || lie.part_step == step => {
                    lie.part_step = step;
                    members.push(part.part);
                }
                _ => {
                    let lie = Lie {
                        steps: part.steps,
                        part_step: [0; 2],
                        row: part.row,
                    };
                    sets.push((lie, vec![part.part], part.base));
                }
            }
            last = Some(part);
        }
        Some(sets)
    }

    fn part_lie(&self, group: &Group, plane: &Plane, assignment: Assignment) -> Option<PartLie> {
        let owner = [assignment.source, assignment.target];
        let mut lie = PartLie {
            part: plane.part,
            row: self.component(TARGET).row_bytes(plane.part),
            placement: [0; 2],
            steps: [[0; 3]; 2],
            base: LayerBase {
                layer: plane.layer,
                region: [0; 2],
                offset: [0; 2],
            },
        };
        for side in [SOURCE, TARGET] {
            let place = plane.places[side].get(owner[side])?;
            let rank = group.owners[side].get(owner[side])?.rank;
            let placement = self.placement(side, rank, place.placement)?;
            let heads = u64::from(assignment.heads.first.checked_sub(placement.heads.first)?);
            let strides = &placement.strides;
            lie.placement[side] = place.placement;
            lie.steps[side] = inner_steps(strides);
            lie.base.region[side] = placement.region;
            lie.base.offset[side] = [
                place.layer.checked_mul(strides.layer)?,
                place.part.checked_mul(strides.part)?,
                heads.checked_mul(strides.head)?,
            ]
            .into_iter()
            .try_fold(placement.offset, u64::checked_add)?;
        }
        Some(lie)
    }

    fn empty_stream(&self, group: &Group, assignment: Assignment, lie: &Lie, parts: Vec<u16>) -> Stream {
        let ranks = [
            group.owners[SOURCE][assignment.source].rank,
            group.owners[TARGET][assignment.target].rank,
        ];
        let unit = self.unit();
        let shares = [SOURCE, TARGET].map(|side| self.share(side, ranks[side]));
        let steps = |at: usize| [SOURCE, TARGET].map(|side| lie.steps[side][at]);
        Stream {
            prefill_rank: ranks[SOURCE],
            decode_rank: ranks[TARGET],
            component: self.at[TARGET],
            parts,
            heads: assignment.heads,
            unit,
            window: self.component(TARGET).window.map(u64::from),
            tokens: TokenSet::new(
                shares[SOURCE],
                shares[TARGET],
                u64::from(self.page_size(SOURCE)),
                u64::from(self.page_size(TARGET)),
            ),
            groups: [SOURCE, TARGET].map(|side| self.component(side).page_group),
            row: lie.row,
            page_step: steps(0),
            token_step: steps(1),
            head_step: steps(2),
            part_step: lie.part_step,
            layer_step: None,
            layers: Vec::new(),
            order: [Axis::Layer, Axis::Part, Axis::Run, Axis::Token, Axis::Head],
        }
    }
}

/// What layers of one stream have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lie {
    /// Page, token and head strides of each side.
    steps: Both<[u64; 3]>,
    part_step: Both<u64>,
    row: u64,
}

/// How one part of one layer lies.
struct PartLie {
    part: u16,
    row: u64,
    placement: Both<usize>,
    steps: Both<[u64; 3]>,
    base: LayerBase,
}

impl PartLie {
    /// The distance to the next part, where both can be walked as one axis: both sides keep them in one
    /// placement or in one page, in the same order.
    fn step_to(&self, next: &PartLie) -> Option<Both<u64>> {
        if self.steps != next.steps || self.row != next.row || self.base.region != next.base.region {
            return None;
        }
        let mut step = [0; 2];
        for side in [SOURCE, TARGET] {
            step[side] = next.base.offset[side].checked_sub(self.base.offset[side])?;
            let in_page = step[side] < self.steps[side][0];
            if step[side] == 0 || !(in_page || self.placement[side] == next.placement[side]) {
                return None;
            }
        }
        Some(step)
    }
}
