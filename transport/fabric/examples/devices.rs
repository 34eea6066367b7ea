//! Lists the RDMA devices of this host, and says whether each can be used:
//! `cargo run -p tonic-rdma-fabric --example devices`.

use std::process::ExitCode;

use tonic_rdma_fabric::Fabric;

fn main() -> ExitCode {
    let devices = match Fabric::devices() {
        Ok(devices) => devices,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    for device in &devices {
        println!("{} ({})", device.name, device.transport);
        for port in &device.ports {
            println!(
                "  port {}: {}, MTU {}, messages up to {} bytes",
                port.number, port.state, port.mtu, port.max_msg
            );
        }
        println!("  addresses: {:?}", device.addresses);
        match Fabric::open(Some(&device.name)) {
            Ok(_) => println!("  usable"),
            Err(error) => println!("  not usable: {error}"),
        }
    }
    match Fabric::open(None) {
        Ok(fabric) => {
            println!("first usable: {}", fabric.name());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
