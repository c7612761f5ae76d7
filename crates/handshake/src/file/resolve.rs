//! From a file's keys to an envelope: names become positions, the short form becomes ranks.

use toml::Spanned;

use super::document::{
    ArrangementEntry, ComponentEntry, Document, GroupEntry, Names, PlacementEntry, RankEntry,
};
use super::key_at::key_at;
use super::problems::Problems;
use super::spots::Spots;
use super::{FileError, MAX_ENVELOPE_FILE};
use crate::element::Element;
use crate::envelope::{
    Component, Dcp, Envelope, HeadSpan, Identity, Kind, PageGroup, Part, Placement, Rank, Scales, Strides,
    Unit,
};
use crate::launch::Arrangement;
use crate::limits::{MAX_COMPONENTS, MAX_HEADS, MAX_PAGE_GROUPS, MAX_RANKS};

pub(super) fn resolve(text: &str) -> Result<Envelope, FileError> {
    let mut problems = Problems::new(text);
    if text.len() > MAX_ENVELOPE_FILE {
        problems.add(
            None,
            "",
            format!("{} bytes; {MAX_ENVELOPE_FILE} are allowed", text.len()),
        );
        return Err(problems.into_error());
    }
    let document: Document = match toml::from_str(text) {
        Ok(document) => document,
        Err(error) => {
            let key = error.span().map(|span| key_at(text, span.start));
            problems.add(
                error.span().as_ref(),
                &key.unwrap_or_default(),
                error.message().to_owned(),
            );
            return Err(problems.into_error());
        }
    };
    for (key, len, most) in [
        ("page_group", document.page_group.len(), MAX_PAGE_GROUPS),
        ("component", document.component.len(), MAX_COMPONENTS),
        ("rank", document.rank.len(), MAX_RANKS),
    ] {
        if len > most {
            problems.add(None, key, format!("{len} entries; {most} are allowed"));
        }
    }
    if !problems.is_empty() {
        return Err(problems.into_error());
    }

    let page_groups = page_groups(&document.page_group, &mut problems);
    let components = components(&document, &mut problems);
    let ranks = ranks(&document, &page_groups, &components, &mut problems);
    if !problems.is_empty() {
        return Err(problems.into_error());
    }
    let spots = Spots::of(&document);
    let envelope = Envelope {
        identity: identity(document),
        page_groups,
        components,
        ranks,
    };
    if let Err(invalid) = envelope.validate() {
        for fault in &invalid.faults {
            problems.add_fault(spots.of_fault(&envelope, &fault.field), fault);
        }
        problems.add_more(invalid.more);
        return Err(problems.into_error());
    }
    Ok(envelope)
}

fn identity(document: Document) -> Identity {
    Identity {
        engine: document.engine,
        role: document.role,
        incarnation: document.incarnation,
        model: document.model,
        revision: document.revision,
        weights_digest: document.weights_digest,
        config_digest: document.config_digest,
        framework: document.framework,
        framework_version: document.framework_version,
        prefill_context_parallel: document.prefill_context_parallel,
    }
}

fn page_groups(entries: &[Spanned<GroupEntry>], problems: &mut Problems<'_>) -> Vec<PageGroup> {
    let names: Vec<&str> = entries
        .iter()
        .map(|entry| entry.get_ref().name.as_str())
        .collect();
    let mut groups = Vec::new();
    for (at, entry) in entries.iter().enumerate() {
        let entry = entry.get_ref();
        let pool = match &entry.pool {
            None => at,
            Some(pool) => problems.position(pool, &names, || format!("page_group.{}.pool", entry.name)),
        };
        groups.push(PageGroup {
            name: entry.name.clone(),
            page_size: entry.page_size,
            pool_pages: entry.pool_pages,
            pool: short(pool),
        });
    }
    groups
}

fn components(document: &Document, problems: &mut Problems<'_>) -> Vec<Component> {
    let groups: Vec<&str> = document
        .page_group
        .iter()
        .map(|entry| entry.get_ref().name.as_str())
        .collect();
    let mut components = Vec::new();
    for spanned in &document.component {
        let entry = spanned.get_ref();
        let key = |key: &str| format!("component.{}.{key}", entry.name);
        let page_group = problems.position(&entry.page_group, &groups, || key("page_group"));
        if entry.scales.is_none() && !plain(entry.element) {
            problems.add(
                Some(&spanned.span()),
                &key("scales"),
                format!(
                    "is missing; elements of {} are scaled: write \"none\", \"model\", \"inline\" or {{ component = \
                     \"NAME\" }}",
                    entry.element
                ),
            );
        }
        components.push(component(entry, short(page_group)));
    }
    components
}

/// Whether elements of this type are stored without scales, as a rule.
fn plain(element: Element) -> bool {
    matches!(
        element,
        Element::Auto | Element::Fp32 | Element::Fp16 | Element::Bf16 | Element::Uint8
    )
}

fn component(entry: &ComponentEntry, page_group: u16) -> Component {
    let part = |part: &super::document::PartEntry| Part {
        name: part.name.clone(),
        heads: part.heads,
        width: part.width,
    };
    Component {
        name: entry.name.clone(),
        kind: entry.kind,
        page_group,
        layers: entry.layers.0.clone(),
        parts: entry.parts.iter().map(part).collect(),
        element: entry.element,
        scales: entry
            .scales
            .as_ref()
            .map_or(Scales::None, |scales| scales.scales()),
        unit: entry.unit.unwrap_or(match (entry.kind, &entry.opaque) {
            (Kind::State, _) => Unit::Slot,
            (_, Some(_)) => Unit::Page,
            (_, None) => Unit::Token,
        }),
        opaque: entry.opaque.clone(),
        window: entry.window,
        dcp: entry.dcp.as_ref().map_or(Dcp::NONE, |dcp| dcp.dcp()),
    }
}

fn ranks(
    document: &Document,
    groups: &[PageGroup],
    components: &[Component],
    problems: &mut Problems<'_>,
) -> Vec<Rank> {
    match (&document.arrangement, document.rank.as_slice()) {
        (None, []) => {
            problems.add(
                None,
                "rank",
                "is missing; write [[rank]] entries, or [arrangement]".to_owned(),
            );
            Vec::new()
        }
        (Some(arrangement), []) => {
            let (cp, stated) = (arrangement.get_ref().cp, document.prefill_context_parallel);
            if cp != stated {
                problems.add(
                    Some(&arrangement.span()),
                    "arrangement.cp",
                    format!(
                        "is {cp}, but prefill_context_parallel is {stated}; write the same number for both"
                    ),
                );
            }
            arranged(arrangement, groups, components, problems)
        }
        (Some(arrangement), _) => {
            problems.add(
                Some(&arrangement.span()),
                "arrangement",
                "makes all ranks; leave out either it or the [[rank]] entries".to_owned(),
            );
            Vec::new()
        }
        (None, ranks) => ranks
            .iter()
            .enumerate()
            .map(|(at, entry)| rank(at, entry.get_ref(), components, problems))
            .collect(),
    }
}

fn arranged(
    entry: &Spanned<ArrangementEntry>,
    groups: &[PageGroup],
    components: &[Component],
    problems: &mut Problems<'_>,
) -> Vec<Rank> {
    let keys = entry.get_ref();
    let layers = components
        .iter()
        .flat_map(|component| &component.layers)
        .max()
        .map_or(1, |l| l.saturating_add(1));
    let arrangement = Arrangement {
        tp: keys.tp,
        cp: keys.cp,
        stages: keys.stages.clone().unwrap_or_else(|| vec![layers]),
        order: keys.order.into(),
        allocation: keys.allocation.into(),
        padding: keys.padding.into(),
    };
    // Names that were not found have been told; ranks made from their stand-ins would only add noise.
    if !problems.is_empty() {
        return Vec::new();
    }
    arrangement.ranks(groups, components).unwrap_or_else(|error| {
        problems.add(Some(&entry.span()), "arrangement", error.to_string());
        Vec::new()
    })
}

fn rank(at: usize, entry: &RankEntry, components: &[Component], problems: &mut Problems<'_>) -> Rank {
    let placements = entry
        .placement
        .iter()
        .enumerate()
        .map(|(index, placement)| {
            let key = |key: &str| format!("rank.{at}.placement.{index}.{key}");
            self::placement(placement.get_ref(), components, problems, key)
        })
        .collect();
    Rank {
        rank: entry.rank,
        dcp_rank: entry.dcp_rank,
        placements,
    }
}

fn placement(
    entry: &PlacementEntry,
    components: &[Component],
    problems: &mut Problems<'_>,
    key: impl Fn(&str) -> String,
) -> Placement {
    let names: Vec<&str> = components
        .iter()
        .map(|component| component.name.as_str())
        .collect();
    let before = problems.len();
    let component = problems.position(&entry.component, &names, || key("component"));
    let mut parts = Vec::new();
    if problems.len() == before {
        let known: Vec<&str> = components[component]
            .parts
            .iter()
            .map(|part| part.name.as_str())
            .collect();
        let wanted: &[String] = match entry.parts.get_ref() {
            Names::One(name) => std::slice::from_ref(name),
            Names::Many(names) => names,
        };
        for name in wanted {
            let name = Spanned::new(entry.parts.span(), name.clone());
            parts.push(short(problems.position(&name, &known, || key("parts"))));
        }
    }
    let heads = head_span(entry.heads.get_ref()).unwrap_or_else(|| {
        let message = format!(
            "{:?} are no heads; write \"0-3\", or \"5\" for one",
            entry.heads.get_ref()
        );
        problems.add(Some(&entry.heads.span()), &key("heads"), message);
        HeadSpan { first: 0, count: 1 }
    });
    Placement {
        component: short(component),
        layers: entry.layers.0.clone(),
        parts,
        heads,
        region: entry.region,
        offset: entry.offset,
        strides: Strides {
            page: entry.strides.page,
            token: entry.strides.token,
            head: entry.strides.head,
            part: entry.strides.part,
            layer: entry.strides.layer,
        },
    }
}

fn head_span(text: &str) -> Option<HeadSpan> {
    let number = |text: &str| {
        let text = text.trim();
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits
            .then(|| text.parse::<u32>().ok())
            .flatten()
            .filter(|head| *head < MAX_HEADS)
    };
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (number(first)?, number(last)?),
        None => (number(text)?, number(text)?),
    };
    Some(HeadSpan {
        first,
        count: last.checked_sub(first)? + 1,
    })
}

/// Positions fit: the lists that they point into are bounded.
fn short(position: usize) -> u16 {
    u16::try_from(position).unwrap_or(u16::MAX)
}
