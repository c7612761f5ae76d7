//! Lists of numbers written as spans: `0-31,40`.

/// Writes numbers, in their order, with runs of consecutive ones as `first-last`.
pub fn spans(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    let runs: Vec<String> = runs
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            _ => run[0].to_string(),
        })
        .collect();
    runs.join(",")
}

/// Reads what [`spans`] writes; at most `most` numbers.
pub(crate) fn parse_spans(text: &str, most: usize) -> Result<Vec<u32>, String> {
    let mut numbers = Vec::new();
    let number = |text: &str| {
        let text = text.trim();
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        digits
            .then(|| text.parse::<u32>().ok())
            .flatten()
            .ok_or_else(|| format!("{text:?} is no number"))
    };
    for run in text.split(',') {
        let (first, last) = match run.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(run)?, number(run)?),
        };
        if first > last {
            return Err(format!("{first}-{last} runs backwards"));
        }
        if (last - first) as usize >= most.saturating_sub(numbers.len()) {
            return Err(format!("more than {most} numbers"));
        }
        numbers.extend(first..=last);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_as_they_are_written() {
        for (numbers, text) in [
            (vec![], ""),
            (vec![5], "5"),
            (vec![0, 1, 2, 3], "0-3"),
            (vec![0, 1, 4, 7, 8, 9], "0-1,4,7-9"),
            (vec![3, 2, 1], "3,2,1"),
            (vec![u32::MAX - 1, u32::MAX], "4294967294-4294967295"),
        ] {
            assert_eq!(spans(&numbers), text);
            if !numbers.is_empty() {
                assert_eq!(parse_spans(text, 10), Ok(numbers));
            }
        }
        assert_eq!(parse_spans(" 0 - 1 , 3", 10), Ok(vec![0, 1, 3]));
    }

    #[test]
    fn what_is_no_span_is_refused_and_lengths_are_bounded() {
        for text in ["", "a", "1-", "-1", "3-1", "1,,2", "4294967296", "+1", "1-2-3"] {
            assert!(parse_spans(text, 10).is_err(), "{text}");
        }
        assert!(parse_spans("0-4294967295", 4096).is_err());
        assert!(parse_spans("0-9", 10).is_ok());
        assert!(parse_spans("0-9,10", 10).is_err());
    }
}
