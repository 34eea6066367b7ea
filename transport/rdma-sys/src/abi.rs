//! Compares the declarations with `abi.txt`: sizes, offsets, constants, prototypes and versions.

use std::mem::offset_of;

use crate::cm::*;
use crate::device::*;
use crate::functions;
use crate::objects::*;
use crate::port::*;
use crate::queue::*;
use crate::work::*;

const COMMITTED: &str = include_str!("../abi.txt");

/// Lists offsets of fields and, for structs that are declared as a whole, sizes. If a part of a
/// field's path has no name in C, the path in C follows in parentheses.
macro_rules! layouts {
    ($lines:ident: $(
        $extent:ident $c_kind:ident $name:ident {
            $($($field:ident).+ $(($c_name:literal))?,)*
        }
    )*) => {$(
        let c_type = concat!(stringify!($c_kind), " ", stringify!($name));
        if stringify!($extent) == "complete" {
            $lines.push(format!("size {c_type} {}", size_of::<$name>()));
        }
        $(
            let c_name = [$($c_name,)? concat!($(stringify!($field), "."),+)][0];
            let offset = offset_of!($name, $($field).+);
            $lines.push(format!("offset {c_type} {} {offset}", c_name.trim_end_matches('.')));
        )*
    )*};
}

fn layouts() -> Vec<String> {
    let mut lines = Vec::new();
    layouts! { lines:
        prefix struct ibv_device { node_type, transport_type, }
        prefix struct ibv_context {
            device, ops, ops.poll_cq, ops.req_notify_cq, ops.post_send, ops.post_recv, cmd_fd,
            async_fd, num_comp_vectors, abi_compat,
        }
        complete struct ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv, }
        complete struct ibv_device_attr {
            fw_ver, node_guid, max_mr_size, vendor_id, vendor_part_id, max_qp, max_qp_wr,
            device_cap_flags, max_sge, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom,
            max_qp_init_rd_atom, atomic_cap, max_srq, max_srq_sge, max_pkeys, local_ca_ack_delay,
            phys_port_cnt,
        }
        prefix struct ibv_pd { context, handle, }
        complete struct ibv_mr { context, pd, addr, length, handle, lkey, rkey, }
        prefix struct ibv_port_attr {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
            qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout,
            init_type_reply, active_width, active_speed, phys_state, link_layer, flags,
            port_cap_flags2,
        }
        complete union ibv_gid { raw, global, global.interface_id, }
        complete struct ibv_global_route {
            dgid, flow_label, sgid_index, hop_limit, traffic_class,
        }
        complete struct ibv_ah_attr {
            grh, dlid, sl, src_path_bits, static_rate, is_global, port_num,
        }
        complete struct ibv_comp_channel { context, fd, refcnt, }
        prefix struct ibv_cq { context, channel, cq_context, handle, cqe, }
        prefix struct ibv_qp {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num,
        }
        complete struct ibv_async_event { element.cq, element.qp, element.port_num, event_type, }
        complete struct ibv_qp_cap {
            max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data,
        }
        complete struct ibv_qp_init_attr {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all,
        }
        complete struct ibv_qp_attr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
            en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
            port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit,
        }
        complete struct ibv_sge { addr, length, lkey, }
        complete struct ibv_mw_bind_info { mr, addr, length, mw_access_flags, }
        complete struct ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr.rdma.remote_addr,
            wr.rdma.rkey, wr.atomic.compare_add, wr.atomic.swap, wr.atomic.rkey, wr.ud.remote_qkey,
            qp_type, rest.bind_mw.mw ("bind_mw.mw"), rest.bind_mw.bind_info ("bind_mw.bind_info"),
            rest.tso.mss ("tso.mss"),
        }
        complete struct ibv_recv_wr { wr_id, next, sg_list, num_sge, }
        complete struct ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags,
            pkey_index, slid, sl, dlid_path_bits,
        }
        complete struct rdma_event_channel { fd, }
        complete struct rdma_ib_addr { sgid, dgid, pkey, }
        complete struct rdma_addr { src.src_addr ("src_addr"), dst.dst_addr ("dst_addr"), addr, }
        complete struct rdma_route { addr, path_rec, num_paths, }
        prefix struct rdma_cm_id { verbs, channel, context, qp, route, ps, port_num, }
        complete struct rdma_conn_param {
            private_data, private_data_len, responder_resources, initiator_depth, flow_control,
            retry_count, rnr_retry_count, srq, qp_num,
        }
        complete struct rdma_ud_param { private_data, private_data_len, ah_attr, qp_num, qkey, }
        complete struct rdma_cm_event { id, listen_id, event, status, param.conn, param.ud, }
    }
    // `verbs_context` grows at its beginning, so the distances to its last field are compared.
    let context = offset_of!(verbs_context, context);
    for (field, offset) in [
        ("query_port", offset_of!(verbs_context, query_port)),
        ("advise_mr", offset_of!(verbs_context, between)),
        ("sz", offset_of!(verbs_context, sz)),
    ] {
        lines.push(format!("distance struct verbs_context {field} context {}", context - offset));
    }
    lines
}

fn constants() -> Vec<String> {
    let declared = [
        ibv_transport_type::DECLARED,
        ibv_port_state::DECLARED,
        ibv_qp_type::DECLARED,
        ibv_qp_state::DECLARED,
        ibv_event_type::DECLARED,
        ibv_qp_attr_mask::DECLARED,
        ibv_wr_opcode::DECLARED,
        ibv_wc_status::DECLARED,
        ibv_send_flags::DECLARED,
        ibv_access_flags::DECLARED,
        rdma_cm_event_type::DECLARED,
        rdma_port_space::DECLARED,
    ];
    declared.concat().iter().map(|(name, value)| format!("constant {name} {value}")).collect()
}

/// The C type that corresponds to a Rust type.
fn c_type(rust: &str) -> String {
    let rust = rust.replace(' ', "");
    if let Some(inner) = rust.strip_prefix("*mut") {
        return format!("{} *", c_type(inner)).replace("* *", "**");
    }
    if let Some(inner) = rust.strip_prefix("*const") {
        return format!("const {} *", c_type(inner));
    }
    match rust.strip_suffix("::Type").unwrap_or(&rust) {
        "()" | "c_void" => "void".to_owned(),
        "c_int" => "int".to_owned(),
        "c_uint" => "unsigned int".to_owned(),
        "c_char" => "char".to_owned(),
        "u8" => "uint8_t".to_owned(),
        "u64" => "uint64_t".to_owned(),
        "usize" => "size_t".to_owned(),
        "ibv_gid" => "union ibv_gid".to_owned(),
        name if name == rust => format!("struct {name}"),
        name => format!("enum {name}"),
    }
}

fn prototypes() -> Vec<String> {
    let line = |declared: &functions::Declared| {
        let kind = if declared.is_optional { "optional" } else { "function" };
        let arguments: Vec<String> = declared.arguments.iter().copied().map(c_type).collect();
        let arguments = if arguments.is_empty() { "void".to_owned() } else { arguments.join(", ") };
        let functions::Declared { library, version, name, returned, .. } = declared;
        let returned = c_type(returned);
        format!("{kind} {library} {version} {returned} {name}({arguments})").replace("* ", "*")
    };
    functions::DECLARED.iter().map(line).collect()
}

/// The line for this target. In `abi.txt`, a number for AArch64 with glibc may follow in
/// parentheses.
fn for_this_target(line: &str) -> String {
    let Some((line, other)) = line.split_once(" (aarch64-gnu ") else { return line.to_owned() };
    if !cfg!(all(target_arch = "aarch64", target_env = "gnu")) {
        return line.to_owned();
    }
    let name = line.rsplit_once(' ').map_or("", |(name, _)| name);
    format!("{name} {}", other.trim_end_matches(')'))
}

#[test]
fn declarations_are_as_committed() {
    let declared = [layouts(), constants(), prototypes()].concat();
    let lines = COMMITTED.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let committed: Vec<String> = lines.map(for_this_target).collect();
    if declared != committed {
        let other = |these: &[String], those: &[String]| {
            let missing = these.iter().filter(|line| !those.contains(line));
            missing.map(|line| format!("\n  {line}")).collect::<String>()
        };
        panic!(
            "not in abi.txt, or in another place:{}\nnot declared:{}",
            other(&declared, &committed),
            other(&committed, &declared)
        );
    }
}
