//! The burst of requests: real prompt lengths, as many as the machine's memory holds.

use anyhow::Context as _;

/// Llama-3.1-8B in bf16: 32 layers, K and V, 8 heads of 128 elements of 2 bytes.
pub(crate) const BYTES_PER_TOKEN: u64 = 32 * 2 * 8 * 128 * 2;
/// Tokens a page.
pub(crate) const PAGE_SIZE: u64 = 16;

/// A short prompt, the median and the 90th percentile of a public trace of conversations.
const SHORT: u64 = 964;
const MEDIAN: u64 = 6_909;
const LONG: u64 = 27_367;

/// Prompt lengths of one burst.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Burst {
    /// Tokens of each request.
    pub(crate) tokens: Vec<u64>,
    /// Pages that each rank's pool needs: all requests, and room to scatter them.
    pub(crate) pool_pages: u64,
}

impl Burst {
    fn of(tokens: &[u64]) -> Burst {
        let pages: u64 = tokens.iter().map(|tokens| tokens.div_ceil(PAGE_SIZE)).sum();
        Burst {
            tokens: tokens.to_vec(),
            pool_pages: pages + pages / 10 + 8,
        }
    }

    /// Bytes of both engines' pools.
    pub(crate) fn memory(&self) -> u64 {
        2 * self.pool_pages * PAGE_SIZE * BYTES_PER_TOKEN
    }

    /// The largest burst whose pools fit into four fifths of `available` bytes.
    pub(crate) fn fitting(available: u64, small: bool) -> anyhow::Result<Burst> {
        let bursts: &[&[u64]] = &[
            &[SHORT, MEDIAN, LONG, SHORT, MEDIAN, SHORT],
            &[SHORT, MEDIAN, LONG],
            &[SHORT, MEDIAN, SHORT, MEDIAN],
            &[SHORT, MEDIAN],
            &[SHORT],
        ];
        let bursts: Vec<Burst> = bursts
            .iter()
            .skip(if small { 3 } else { 0 })
            .map(|tokens| Burst::of(tokens))
            .collect();
        let least = bursts.last().map_or(0, Burst::memory) >> 20;
        let fits = |burst: &Burst| burst.memory() < available / 5 * 4;
        bursts.into_iter().find(fits).with_context(|| {
            format!(
                "the smallest burst needs {least} MiB of memory; {} MiB are available",
                available >> 20
            )
        })
    }
}

/// Bytes that this process may still use: of the machine, and of its container where that has a limit.
pub(crate) fn memory_available() -> anyhow::Result<u64> {
    let machine = machine_available()?;
    let container = CONTROL_GROUPS.iter().find_map(container_available);
    Ok(container.map_or(machine, |container| container.min(machine)))
}

/// Limit, usage and statistics of a container's memory, and the names of what of it the kernel takes back at need.
type GroupFiles = ([&'static str; 3], [&'static str; 2]);

/// As a container sees them: control groups version 2, then 1.
const CONTROL_GROUPS: [GroupFiles; 2] = [
    (
        [
            "/sys/fs/cgroup/memory.max",
            "/sys/fs/cgroup/memory.current",
            "/sys/fs/cgroup/memory.stat",
        ],
        ["inactive_file", "active_file"],
    ),
    (
        [
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ],
        ["total_inactive_file", "total_active_file"],
    ),
];

/// `None` where there is no such file, or no limit.
fn container_available(([limit, usage, statistics], cached): &GroupFiles) -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(file).ok();
    available_of(&read(limit)?, &read(usage)?, &read(statistics)?, cached)
}

fn available_of(limit: &str, usage: &str, statistics: &str, cached: &[&str; 2]) -> Option<u64> {
    let (limit, usage) = (
        limit.trim().parse::<u64>().ok()?,
        usage.trim().parse::<u64>().ok()?,
    );
    let value = |name: &str| {
        let mut lines = statistics.lines().filter_map(|line| line.split_once(' '));
        let found = lines.find(|(key, _)| *key == name)?.1;
        found.trim().parse::<u64>().ok()
    };
    let cached: u64 = cached.iter().filter_map(|name| value(name)).sum();
    Some(limit.saturating_sub(usage.saturating_sub(cached)))
}

/// `MemAvailable`, in bytes.
fn machine_available() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo does not tell MemAvailable")? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_burst_follows_the_memory() {
        let at = |gib: u64, small| Burst::fitting(gib << 30, small).unwrap().tokens;
        assert_eq!(at(24, false).len(), 6);
        assert_eq!(at(13, false), [SHORT, MEDIAN, LONG]);
        assert!(!at(6, false).contains(&LONG));
        assert_eq!(at(24, true), [SHORT, MEDIAN]);
        assert_eq!(at(1, true), [SHORT]);
        let error = Burst::fitting(1 << 20, false).unwrap_err().to_string();
        assert!(error.contains("MiB"), "{error}");
    }

    #[test]
    fn a_container_may_have_less_than_the_machine() {
        let statistics = "anon 5\ninactive_file 20\nactive_file 10\n";
        let cached = &CONTROL_GROUPS[0].1;
        assert_eq!(available_of("100\n", "50\n", statistics, cached), Some(80));
        assert_eq!(available_of("max\n", "50\n", statistics, cached), None);
    }

    #[test]
    fn this_machine_tells_its_memory() {
        assert!(memory_available().unwrap() > 0);
    }
}
