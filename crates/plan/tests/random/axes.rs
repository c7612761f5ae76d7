//! Every value of every axis that the cases have to have had.

use super::draw::Seen;
use super::model::PAGE_SIZES;

const NAMED: [(&str, &[&str]); 20] = [
    (
        "axes",
        &[
            "NHD",
            "HND",
            "any permutation",
            "layers in pages",
            "pages in layers",
        ],
    ),
    ("chunk bytes", &["1", "16", "128", "1024", "4194304"]),
    ("chunks that moved with the end", &["open", "known"]),
    ("components", &["1", "2", "3"]),
    (
        "dcp",
        &[
            "1 -> 1",
            "1 -> N",
            "N -> 1",
            "N -> N",
            "N -> N, interleaves drawn apart",
            "N -> M",
        ],
    ),
    ("decode pages", &["some absent"]),
    ("heads of a rank", &["together", "apart"]),
    ("held", &["nothing", "a page", "any", "everything"]),
    ("k and v", &["equal", "unequal"]),
    ("kind", &["kv", "latent", "window", "indexer", "scales", "state"]),
    ("layer order", &["permuted"]),
    ("layers", &["together", "apart"]),
    ("offset", &["small", "beyond 4 GiB"]),
    ("page ids", &["in order", "scattered"]),
    ("page lists", &["shared"]),
    ("pages", &["equal", "unequal"]),
    ("parts", &["together", "apart"]),
    ("prompt", &["shorter", "as asked", "longer"]),
    ("strides", &["dense", "padded", "huge"]),
    ("tokens", &["1", "P-1", "P", "P+1", "4P+3", "any"]),
];

/// Fails, by name, when a value was never drawn.
pub(crate) fn check(seen: &Seen) {
    let numbers = |low: u32, high: u32| (low..=high).map(|n| n.to_string()).collect::<Vec<_>>();
    let pages: Vec<String> = PAGE_SIZES.iter().map(u32::to_string).collect();
    let mut axes: Vec<(&str, Vec<String>)> = NAMED
        .iter()
        .map(|(axis, values)| (*axis, values.iter().map(|value| (*value).to_owned()).collect()))
        .collect();
    axes.extend([
        ("prefill TP", numbers(1, 16)),
        ("decode TP", numbers(1, 16)),
        ("prefill PP", numbers(1, 3)),
        ("decode PP", numbers(1, 3)),
        ("heads", numbers(1, 16)),
        ("page size", pages.clone()),
        // Every number that divides a page.
        ("interleave", [pages, vec!["6".to_owned()]].concat()),
        ("window", vec!["left pages".to_owned()]),
    ]);
    let mut never = Vec::new();
    for (axis, values) in &axes {
        for value in values {
            if !seen.contains_key(&(*axis, value.clone())) {
                never.push(format!("{axis}: {value}"));
            }
        }
    }
    assert!(never.is_empty(), "never exercised: {never:?}");
    let unlisted: Vec<_> = seen
        .keys()
        .filter(|(axis, value)| {
            !axes
                .iter()
                .any(|(name, values)| name == axis && values.contains(value))
        })
        .collect();
    assert!(unlisted.is_empty(), "drawn, but not listed here: {unlisted:?}");
}
