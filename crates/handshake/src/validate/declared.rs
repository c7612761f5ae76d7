//! What an envelope declares before any rank: identity, page groups, components.

use std::collections::HashSet;

use super::Faults;
use crate::envelope::{Component, Dcp, Envelope, Identity, Kind, Scales, Unit};
use crate::limits::{
    MAX_COMPONENTS, MAX_CONTEXT_PARALLEL, MAX_HEADS, MAX_LAYERS, MAX_MODEL, MAX_NAME, MAX_PAGE_GROUPS,
    MAX_PAGE_SIZE, MAX_PARTS, MAX_RANKS, MAX_WIDTH, MAX_WINDOW,
};

pub(super) fn check(envelope: &Envelope, faults: &mut Faults) {
    identity(&envelope.identity, faults);
    let mut sound = count(faults, "page_group", envelope.page_groups.len(), MAX_PAGE_GROUPS);
    sound &= count(faults, "component", envelope.components.len(), MAX_COMPONENTS);
    sound &= count(faults, "rank", envelope.ranks.len(), MAX_RANKS);
    if !sound {
        return;
    }
    page_groups(envelope, faults);
    components(envelope, faults);
}

fn count(faults: &mut Faults, field: &str, len: usize, most: usize) -> bool {
    let sound = (1..=most).contains(&len);
    if !sound {
        faults.invalid(
            || field.to_owned(),
            || format!("{len} entries; 1 to {most} are allowed"),
        );
    }
    sound
}

fn identity(identity: &Identity, faults: &mut Faults) {
    name(faults, || "engine".to_owned(), &identity.engine);
    name(faults, || "framework".to_owned(), &identity.framework);
    text(
        faults,
        || "framework_version".to_owned(),
        &identity.framework_version,
        MAX_NAME,
    );
    text(faults, || "model".to_owned(), &identity.model, MAX_MODEL);
    if identity.model.is_empty() {
        faults.invalid(|| "model".to_owned(), || "is empty; name the model".to_owned());
    }
    let optional = [
        ("revision", &identity.revision),
        ("weights_digest", &identity.weights_digest),
        ("config_digest", &identity.config_digest),
    ];
    for (field, value) in optional {
        let Some(value) = value else { continue };
        text(faults, || field.to_owned(), value, MAX_MODEL);
        if value.is_empty() {
            faults.invalid(
                || field.to_owned(),
                || "is empty; leave it out when it is not known".to_owned(),
            );
        }
    }
    faults.bounded(
        || "prefill_context_parallel".to_owned(),
        identity.prefill_context_parallel.into(),
        1,
        MAX_CONTEXT_PARALLEL.into(),
    );
}

/// A name: it stands in addresses, file keys, logs and metrics.
fn name(faults: &mut Faults, field: impl Fn() -> String, value: &str) {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-:@+".contains(c);
    if value.is_empty() || value.len() > MAX_NAME {
        faults.invalid(&field, || {
            format!("is {} bytes long; 1 to {MAX_NAME} are allowed", value.len())
        });
    } else if !value.chars().all(plain) {
        faults.invalid(&field, || {
            format!("{value:?} may hold only letters, digits and . _ - : @ +")
        });
    }
}

fn text(faults: &mut Faults, field: impl Fn() -> String, value: &str, most: usize) {
    if value.len() > most {
        faults.invalid(&field, || {
            format!("is {} bytes long; at most {most} are allowed", value.len())
        });
    } else if value.chars().any(char::is_control) {
        faults.invalid(&field, || "holds control characters".to_owned());
    }
}

fn page_groups(envelope: &Envelope, faults: &mut Faults) {
    let mut names = HashSet::new();
    for (at, group) in envelope.page_groups.iter().enumerate() {
        let field = |key: &str| format!("page_group.{}.{key}", label(&group.name, at));
        name(faults, || format!("page_group.{at}.name"), &group.name);
        if !names.insert(&group.name) {
            faults.invalid(|| field("name"), || "is used by two page groups".to_owned());
        }
        faults.bounded(
            || field("page_size"),
            group.page_size.into(),
            1,
            MAX_PAGE_SIZE.into(),
        );
        // Page ids are below this; u32::MAX stands for an absent page.
        faults.bounded(
            || field("pool_pages"),
            group.pool_pages.into(),
            1,
            u32::MAX.into(),
        );
        let owner = usize::from(group.pool);
        match envelope.page_groups.get(owner) {
            None => faults.invalid(
                || field("pool"),
                || {
                    format!(
                        "names page group {owner}; there are {}",
                        envelope.page_groups.len()
                    )
                },
            ),
            Some(pool) if usize::from(pool.pool) != owner => faults.invalid(
                || field("pool"),
                || format!("names {:?}, which itself draws from another pool", pool.name),
            ),
            Some(pool) if pool.pool_pages != group.pool_pages => faults.invalid(
                || field("pool_pages"),
                || {
                    format!(
                        "is {}, but {} in {:?}, whose pool it shares",
                        group.pool_pages, pool.pool_pages, pool.name
                    )
                },
            ),
            Some(_) => {}
        }
    }
}

fn components(envelope: &Envelope, faults: &mut Faults) {
    let mut names = HashSet::new();
    let mut first_of_group: Vec<Option<&Component>> = vec![None; envelope.page_groups.len()];
    for (at, component) in envelope.components.iter().enumerate() {
        let field = |key: &str| format!("component.{}.{key}", label(&component.name, at));
        name(faults, || format!("component.{at}.name"), &component.name);
        if !names.insert(&component.name) {
            faults.invalid(|| field("name"), || "is used by two components".to_owned());
        }
        layers(component, faults, field);
        parts(component, faults, field);
        kind_and_unit(component, faults, field);
        scales(envelope, component, faults, field);
        let dcp_sound = dcp_bounds(component.dcp, faults, field);
        let group_at = usize::from(component.page_group);
        let Some(group) = envelope.page_groups.get(group_at) else {
            faults.invalid(
                || field("page_group"),
                || {
                    format!(
                        "names page group {group_at}; there are {}",
                        envelope.page_groups.len()
                    )
                },
            );
            continue;
        };
        if component.unit == Unit::Slot && group.page_size != 1 {
            faults.invalid(
                || format!("page_group.{}.page_size", group.name),
                || {
                    format!(
                        "is {}, but {:?} holds slots, so it must be 1",
                        group.page_size, component.name
                    )
                },
            );
        }
        if dcp_sound && group.page_size % component.dcp.interleave != 0 {
            faults.invalid(
                || field("dcp.interleave"),
                || {
                    format!(
                        "{} does not divide the page size {}",
                        component.dcp.interleave, group.page_size
                    )
                },
            );
        }
        match first_of_group[group_at] {
            None => first_of_group[group_at] = Some(component),
            Some(first) => one_page_list(first, component, faults, field),
        }
    }
    for (group, first) in envelope.page_groups.iter().zip(first_of_group) {
        if first.is_none() {
            faults.invalid(
                || format!("page_group.{}", group.name),
                || "no component is in it".to_owned(),
            );
        }
    }
}

/// Components that share a page list must mean the same thing by its entries.
fn one_page_list(first: &Component, other: &Component, faults: &mut Faults, field: impl Fn(&str) -> String) {
    if (first.unit == Unit::Slot) != (other.unit == Unit::Slot) {
        faults.invalid(
            || field("page_group"),
            || {
                format!(
                    "slots and tokens cannot share a page list; {:?} is in the same group",
                    first.name
                )
            },
        );
    } else if !first.dcp.same(other.dcp) {
        faults.invalid(
            || field("dcp"),
            || {
                format!(
                    "is {}, but {} for {:?}: a page list holds the local tokens of one split",
                    other.dcp, first.dcp, first.name
                )
            },
        );
    }
}

fn layers(component: &Component, faults: &mut Faults, field: impl Fn(&str) -> String) {
    let layers = &component.layers;
    if layers.is_empty() || layers.len() > MAX_LAYERS {
        faults.invalid(
            || field("layers"),
            || format!("{} layers; 1 to {MAX_LAYERS} are allowed", layers.len()),
        );
        return;
    }
    if let Some(pair) = layers.windows(2).find(|pair| pair[0] >= pair[1]) {
        faults.invalid(
            || field("layers"),
            || format!("{} stands before {}; layer ids must ascend", pair[0], pair[1]),
        );
    }
    if let Some(layer) = layers
        .iter()
        .find(|layer| u64::from(**layer) >= MAX_LAYERS as u64)
    {
        faults.invalid(
            || field("layers"),
            || format!("{layer} is not below {MAX_LAYERS}"),
        );
    }
}

fn parts(component: &Component, faults: &mut Faults, field: impl Fn(&str) -> String) {
    let parts = &component.parts;
    if parts.is_empty() || parts.len() > MAX_PARTS {
        faults.invalid(
            || field("parts"),
            || format!("{} parts; 1 to {MAX_PARTS} are allowed", parts.len()),
        );
        return;
    }
    let mut names = HashSet::new();
    for (at, part) in parts.iter().enumerate() {
        let field = |key: &str| field(&format!("part.{}.{key}", label(&part.name, at)));
        name(faults, || field("name"), &part.name);
        if !names.insert(&part.name) {
            faults.invalid(|| field("name"), || "is used by two parts".to_owned());
        }
        faults.bounded(|| field("heads"), part.heads.into(), 1, MAX_HEADS.into());
        if !faults.bounded(|| field("width"), part.width.into(), 1, MAX_WIDTH.into()) {
            continue;
        }
        let bits = u64::from(part.width) * u64::from(component.element.bits());
        if bits % 8 != 0 {
            faults.invalid(
                || field("width"),
                || {
                    format!(
                        "{} elements of {} fill no whole number of bytes",
                        part.width, component.element
                    )
                },
            );
        }
        if component.kind == Kind::Latent && part.heads != 1 {
            faults.invalid(
                || field("heads"),
                || format!("is {}; a latent is one for all heads", part.heads),
            );
        }
    }
}

fn kind_and_unit(component: &Component, faults: &mut Faults, field: impl Fn(&str) -> String) {
    if (component.kind == Kind::State) != (component.unit == Unit::Slot) {
        faults.invalid(
            || field("unit"),
            || {
                format!(
                    "{} of kind {}: recurrent state, and nothing else, has slots",
                    component.unit, component.kind
                )
            },
        );
    }
    if component.unit == Unit::Slot && component.dcp.size != 1 {
        faults.invalid(
            || field("dcp.size"),
            || {
                format!(
                    "is {}; slots hold no tokens to split, so it must be 1",
                    component.dcp.size
                )
            },
        );
    }
    match (component.kind, component.window) {
        (Kind::Window, None) => {
            faults.invalid(
                || field("window"),
                || "is missing; kind window needs its length in tokens".to_owned(),
            );
        }
        (Kind::Window, Some(window)) => {
            faults.bounded(|| field("window"), window.into(), 1, MAX_WINDOW.into());
        }
        (kind, Some(_)) => {
            faults.invalid(
                || field("window"),
                || format!("is only for kind window, not {kind}"),
            );
        }
        (_, None) => {}
    }
    if let Some(tag) = &component.opaque {
        name(faults, || field("opaque"), tag);
        if component.unit != Unit::Page {
            faults.invalid(
                || field("opaque"),
                || {
                    format!(
                        "is {tag:?}, but the unit is {}; opaque pages move whole, so the unit must be page",
                        component.unit
                    )
                },
            );
        }
    }
}

fn scales(envelope: &Envelope, component: &Component, faults: &mut Faults, field: impl Fn(&str) -> String) {
    if let Scales::Component(target) = &component.scales {
        text(faults, || field("scales"), target, MAX_NAME);
        match envelope.component(target) {
            Some((_, found)) if found.kind == Kind::Scales => {}
            Some((_, found)) => faults.invalid(
                || field("scales"),
                || format!("names {target:?}, which is of kind {}", found.kind),
            ),
            None => faults.invalid(
                || field("scales"),
                || format!("names {target:?}; there is no such component"),
            ),
        }
    }
}

/// True when the interleave can be divided by.
fn dcp_bounds(dcp: Dcp, faults: &mut Faults, field: impl Fn(&str) -> String) -> bool {
    let most = u64::from(MAX_CONTEXT_PARALLEL);
    faults.bounded(|| field("dcp.size"), dcp.size.into(), 1, most);
    faults.bounded(
        || field("dcp.interleave"),
        dcp.interleave.into(),
        1,
        MAX_PAGE_SIZE.into(),
    )
}

/// A name where it is one, the position otherwise: a field path stays readable and short.
fn label(name: &str, at: usize) -> String {
    if name.is_empty() || name.len() > 64 || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
        at.to_string()
    } else {
        name.to_owned()
    }
}
