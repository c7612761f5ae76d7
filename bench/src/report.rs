//! Medians and ratios, as JSON lines and as a table.

use serde::Serialize;

/// One round of one way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    pub(crate) seconds: f64,
    pub(crate) cpu_seconds: f64,
}

/// A path against its reference, for one page size.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) path: String,
    pub(crate) page_bytes: usize,
    pub(crate) pages: usize,
    pub(crate) rounds: usize,
    /// Medians.
    pub(crate) reference_gb_per_s: f64,
    pub(crate) kvferry_gb_per_s: f64,
    /// Median of the rounds' ratios: both ways of a round run one after the other.
    pub(crate) ratio: f64,
    pub(crate) reference_cpu_s_per_gb: f64,
    pub(crate) kvferry_cpu_s_per_gb: f64,
    pub(crate) cpu_ratio: f64,
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

impl Line {
    pub(crate) fn new(
        path: String,
        page_bytes: usize,
        pages: usize,
        reference: &[Round],
        kvferry: &[Round],
    ) -> Line {
        #[allow(clippy::cast_precision_loss)]
        let gb = (page_bytes * pages) as f64 / 1e9;
        let pairs = || reference.iter().zip(kvferry);
        Line {
            path,
            page_bytes,
            pages,
            rounds: kvferry.len(),
            reference_gb_per_s: median(reference.iter().map(|round| gb / round.seconds)),
            kvferry_gb_per_s: median(kvferry.iter().map(|round| gb / round.seconds)),
            ratio: median(pairs().map(|(reference, ours)| reference.seconds / ours.seconds)),
            reference_cpu_s_per_gb: median(reference.iter().map(|round| round.cpu_seconds / gb)),
            kvferry_cpu_s_per_gb: median(kvferry.iter().map(|round| round.cpu_seconds / gb)),
            cpu_ratio: median(pairs().map(|(reference, ours)| ours.cpu_seconds / reference.cpu_seconds)),
        }
    }
}

/// Bytes as a person writes them.
fn size(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

pub(crate) fn table(lines: &[Line]) -> String {
    let mut out = String::from(
        "| path | pages | reference GB/s | Kvferry GB/s | ratio | reference CPU s/GB | Kvferry CPU s/GB | ratio |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for line in lines {
        out += &format!(
            "| {} | {} x {} | {:.2} | {:.2} | {:.2} | {:.3} | {:.3} | {:.2} |\n",
            line.path,
            line.pages,
            size(line.page_bytes),
            line.reference_gb_per_s,
            line.kvferry_gb_per_s,
            line.ratio,
            line.reference_cpu_s_per_gb,
            line.kvferry_cpu_s_per_gb,
            line.cpu_ratio,
        );
    }
    out
}
