//! Page groups, matched by the components that both sides have in them: their names and order are free.

use std::collections::{BTreeMap, BTreeSet};

use super::{Difference, Differences, Gravity};
use crate::catalogue::Code;
use crate::envelope::{Component, Envelope, PageGroup, Unit};

/// Components of both sides, by name.
fn shared<'a>(prefill: &'a Envelope, decode: &'a Envelope) -> BTreeMap<&'a str, [&'a Component; 2]> {
    prefill
        .components
        .iter()
        .filter_map(|p| Some((p.name.as_str(), [p, decode.component(&p.name)?.1])))
        .collect()
}

fn group<'a>(envelope: &'a Envelope, component: &Component) -> &'a PageGroup {
    &envelope.page_groups[usize::from(component.page_group)]
}

/// Page sizes, once for each pair of groups that share components.
pub(super) fn page_sizes(prefill: &Envelope, decode: &Envelope, found: &mut Differences) {
    let mut pairs: BTreeMap<(u16, u16), Vec<[&Component; 2]>> = BTreeMap::new();
    let mut order = Vec::new();
    for [p, d] in shared(prefill, decode).into_values() {
        let of_pair = pairs.entry((p.page_group, d.page_group)).or_default();
        if of_pair.is_empty() {
            order.push((p.page_group, d.page_group));
        }
        of_pair.push([p, d]);
    }
    // In the order of component names, not of either side's list of groups.
    for components in order.iter().filter_map(|pair| pairs.get(pair)) {
        let [p, d] = components[0];
        let (p, d) = (group(prefill, p), group(decode, d));
        if p.page_size == d.page_size {
            continue;
        }
        let whole: Vec<&str> = components
            .iter()
            .filter(|[p, d]| p.unit != Unit::Token || d.unit != Unit::Token)
            .map(|[p, _]| p.name.as_str())
            .collect();
        let said = |group: &PageGroup| match p.name == d.name {
            true => group.page_size.to_string(),
            false => format!("{} (page group {})", group.page_size, group.name),
        };
        let (gravity, why) = if whole.is_empty() {
            let why = "entry k of a page list stands for other tokens on each side: copied page by page, tokens \
                       would land in wrong places";
            (Gravity::Bridgeable, why.to_owned())
        } else {
            let why = format!(
                "pages of {} can only be moved whole, so one side's pages must be the other's",
                whole.join(", ")
            );
            (Gravity::Refused, why)
        };
        let difference = Difference {
            gravity,
            code: Code::PageSize,
            field: format!("page_group.{}.page_size", p.name),
            prefill: said(p),
            decode: said(d),
            why,
        };
        match gravity {
            Gravity::Refused => found.add_with_fix(
                difference,
                "Set the same page size on both: SGLang --page-size, vLLM --block-size. No policy bridges this one."
                    .to_owned(),
            ),
            _ => found.add(difference),
        }
    }
}

/// Which components share a page list. Each side maps a component through its own list, so the planner
/// carries any composition; under strict it must agree, because it shows unequal settings.
pub(super) fn composition(prefill: &Envelope, decode: &Envelope, found: &mut Differences) {
    let shared = shared(prefill, decode);
    let partition = |side: usize| -> BTreeSet<Vec<&str>> {
        let mut groups: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
        for (name, pair) in &shared {
            groups.entry(pair[side].page_group).or_default().push(name);
        }
        groups.into_values().collect()
    };
    let (p, d) = (partition(0), partition(1));
    if p == d {
        return;
    }
    let said = |groups: &BTreeSet<Vec<&str>>| {
        let groups: Vec<String> = groups
            .iter()
            .map(|names| format!("[{}]", names.join(", ")))
            .collect();
        groups.join(" ")
    };
    found.add(Difference {
        gravity: Gravity::Bridgeable,
        code: Code::PageGroups,
        field: "page_group".to_owned(),
        prefill: said(&p),
        decode: said(&d),
        why:
            "a page list of one side stands for other components than the other side's: paired list by list, \
              components would get each other's pages"
                .to_owned(),
    });
}
