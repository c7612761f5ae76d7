//! Tests of the built `kvferry`, as a person or a script uses it.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a panic in a test is a failed test, and its numbers are small"
)]

mod docs_name_what_exists;
mod exit_codes;
mod page_lists;
mod pipes;
mod plan_is_exact;
mod program;
