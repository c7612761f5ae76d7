//! `kvferry`: see [`kvferry_cli`].

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let command = match kvferry_cli::Kvferry::try_parse() {
        Ok(command) => command,
        Err(asked) => return kvferry_cli::exit::usage(&asked).into(),
    };
    match command.run() {
        Ok(exit) => exit.into(),
        Err(error) => {
            let exit = kvferry_cli::exit::of_error(&error);
            if exit != kvferry_cli::exit::Exit::Done {
                kvferry_cli::exit::tell(format_args!("kvferry: {error:#}\n"));
            }
            exit.into()
        }
    }
}
